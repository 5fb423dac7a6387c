//! What a person who runs a simulator may ask for.

/// How many seeds to run, where `usual` is what every test run affords.
pub(crate) fn seeds(usual: u64) -> u64 {
    setting("TENSORCALL_SIM_SEEDS").and_then(|seeds| seeds.parse().ok()).unwrap_or(usual)
}

#[expect(clippy::disallowed_methods, reason = "how a person asks for more seeds, or for one")]
pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
