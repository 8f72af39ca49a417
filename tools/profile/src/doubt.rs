//! Why measurements should not be relied on.

use hpp_model::unreliable_times;
use hpp_schema::Profile;

/// Why times should not be relied on, a sentence for each reason.
pub fn doubts(profile: &Profile) -> Vec<String> {
    profile.busy_machine().into_iter().chain(unreliable_times(profile)).collect()
}
