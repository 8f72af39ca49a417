//! What the three commands share: reads with a size limit, result files, temporary directories, stdout, logs, CPU time of other processes, hints, mistakes in JSON lines.
//!
//! One implementation, so that all output options handle devices, pipes and symbolic links in the same way. Does not
//! know file formats or other crates of this workspace.

mod cpu_monitor;
mod hub;
mod json_line;
mod log;
mod output_file;
mod read;
mod stdout;
mod work_dir;

pub use cpu_monitor::{CpuMonitor, CpuTime};
pub use hub::hub_hint;
pub use json_line::json_line_mistake;
pub use log::{LogFilterError, line_to_stderr, log_to};
pub use output_file::{
    FileWriteError, OutputFile, check_creatable, check_replaceable, is_same_file, is_stream, resolve_link, write_file,
    write_file_as,
};
pub use read::{read, read_text, read_text_from};
pub use stdout::{StdoutError, is_full_disk, print_line, show, show_json};
pub use work_dir::WorkDir;
