//! Where the requests of RT tenants spend their time on this host, and what delays them.
//!
//! Input: the kernel's tracepoints. Output: segments, named priority inversions with their cures, and the worst
//! requests in full.
//!
//! ```text
//! tenants, inventory, intent --> path::Watch --filters--> tracefs::Session (rings in the kernel)
//!                                                             |  page, format, merge: bytes to events in order
//!                                                             v
//!                analyser::Analyser { timeline, waits, request, inversion }
//!                                                             |
//!                               report::Document --> JSON, html, perfetto, text
//! ```
//!
//! [`delay`] takes the same events of the threads of a measuring program, such as cyclictest, for `ontime verify`.
//!
//! Only [`tracefs`], [`interrupts`], [`cost`] and [`hints`] do I/O; everything else is a function of recorded events
//! and is tested on streams recorded from real hosts (`tests/`). Definitions are in docs/reference/trace.md.

pub mod analyser;
pub mod cost;
pub mod delay;
pub mod event;
pub mod format;
pub mod hints;
pub mod html;
pub mod interrupts;
pub mod inversion;
pub mod merge;
pub mod page;
pub mod path;
pub mod perfetto;
pub mod report;
pub mod request;
pub mod text;
pub mod timeline;
pub mod tracefs;
pub mod waits;

pub use analyser::Analyser;
pub use path::{Choice, PathError, Watch};
pub use report::{Document, Run};
pub use tracefs::{Session, TraceError};
