//! Figures and their presentation, the same in the product (`ontime trace`) and in the laboratory's reports.
//!
//! - [`stats`]: exact statistics of samples.
//! - [`number`]: formats figures.
//! - [`page`]: the frame and style of an HTML page.

pub mod number;
mod page;
pub mod stats;

pub use page::page;
