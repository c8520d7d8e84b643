//! Files of weights from outside: all the way round, and damaged ones.

mod circle;
mod common;
mod gguf_keys;
mod hostile;
mod lenient;
