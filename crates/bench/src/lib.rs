//! The experiments and their report: one for each figure or table of the papers.
