//! The packet path by class: typed rules for interrupts, NAPI, vhost, queues and the kernel's own threads.
