//! Weights of models in files: safetensors, Hugging Face folders and GGUF, read by name and range
//! through maps, and written as sharded safetensors.
//!
//! Nothing here knows Burn, ranks or shards. A [`Family`] says which tensors a model's parameters
//! are made of; [`Import`] reads any part of a parameter, and [`export`] makes the tensors again.

mod companions;
mod encoding;
mod error;
pub mod export;
mod family;
mod folder;
mod gguf;
mod gguf_config;
mod gguf_names;
mod gguf_values;
mod import;
mod safetensors_file;
mod stored;
mod weights;
mod write;

pub use companions::{COMPANIONS, is_of_model};
pub use encoding::Encoding;
pub use error::WeightsError;
pub use family::Family;
pub use gguf_values::{GgufValue, GgufValues};
pub use import::{Import, ParameterShape};
pub use stored::StoredTensor;
pub use weights::{Container, Weights};
pub use write::{StoreAs, Tensor, write_adapter, write_folder};
