//! The store of KV pages: in RAM, and below it on disk.
//!
//! A page is one record with the contents of all states of a sequence for a fixed number of tokens. Its key is a hash of all tokens up to
//! its end, so that prompts with the same prefix share pages, and of everything that decides their bits. The store writes new pages to disk
//! in the background, evicts pages from RAM that are on disk, and loads pages when a prompt needs them. It knows no engine and no model:
//! pages are bytes.
//!
//! From the bottom up: `page` and `key` are the bytes and their names, `policy` chooses the page to evict, `record_file` is a file of
//! records, `directory` the directory of a model, `read_queue` orders reads, `table` says where each page is, `store` moves pages.

mod directory;
mod error;
mod key;
mod page;
mod policy;
mod read_queue;
mod record_file;
#[cfg(test)]
mod replay;
mod store;
mod table;

pub use directory::private_directories;
pub use error::PageStoreError;
pub use key::{Fingerprint, PageKey};
pub use page::PageBytes;
pub use policy::{EvictionPolicy, PageFacts};
pub use store::{DiskSettings, NewPage, PageLookup, PageStore, StoreSettings};
pub use table::{LoadTicket, StoreStats};
