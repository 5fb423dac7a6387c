//! `cargo xtask api`: the public interface of the crate `tensorcall` is what `crates/tensorcall/api.txt` lists, so
//! that a change of it is seen in review; with all features. Left out are `engine`, which promises nothing, and the guide.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result, bail};
use public_api::{Builder, MINIMUM_NIGHTLY_RUST_VERSION};

use crate::{packages::target, plan::Plan, process::run, project::Project};

/// The list, as it is checked in.
const LIST: &str = "crates/tensorcall/api.txt";
const LEFT_OUT: [&str; 2] = ["tensorcall::engine", "tensorcall::guide"];

/// Compares the interface with the list, or writes the list.
pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project, bless: bool) {
    plan.step("public interface of the crate", move |_| {
        let (path, listed) = (project.root.join(LIST), list(project)?);
        if bless {
            return fs::write(&path, listed).with_context(|| format!("cannot write {LIST}"));
        }
        let expected = fs::read_to_string(&path).unwrap_or_default();
        if expected == listed {
            return Ok(());
        }
        bail!("the public interface is not what {LIST} lists; if so it shall be, run `cargo xtask api --bless`:\n{}", changes(&expected, &listed));
    });
}

/// One item a line, in order.
fn list(project: &Project) -> Result<String> {
    // The description that rustdoc writes for programs is unstable; this lets the stable compiler write it.
    let rustdoc = [
        "rustdoc",
        "--quiet",
        "-p",
        "tensorcall",
        "--lib",
        "--all-features",
        "--",
        "-Zunstable-options",
        "--output-format=json",
    ];
    run(project.cargo(&rustdoc).env("RUSTC_BOOTSTRAP", "1"))?;
    let json = target(project)?.join("doc/tensorcall.json");
    let api = Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()
        .with_context(|| {
            format!("rustdoc and public-api, which expects {MINIMUM_NIGHTLY_RUST_VERSION}, differ")
        })?;
    let mut list = String::new();
    for item in api.items() {
        let line = item.to_string();
        if !is_left_out(&line) {
            writeln!(list, "{line}")?;
        }
    }
    Ok(list)
}

/// Whether the item itself, and not only what it mentions, is in a part that is left out.
fn is_left_out(line: &str) -> bool {
    let implemented_for = line.strip_prefix("impl").and_then(|rest| rest.rsplit_once(" for "));
    let item = implemented_for.map_or(line, |(_, kind)| kind);
    let own = item.find("tensorcall::").map_or("", |start| &item[start..]);
    LEFT_OUT.iter().any(|part| own.starts_with(part))
}

/// Lines that went and came.
fn changes(before: &str, after: &str) -> String {
    let gone = before
        .lines()
        .filter(|line| !after.lines().any(|other| other == *line))
        .map(|line| format!("- {line}"));
    let come = after
        .lines()
        .filter(|line| !before.lines().any(|other| other == *line))
        .map(|line| format!("+ {line}"));
    gone.chain(come).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_in_a_part_that_is_left_out_is() {
        assert!(is_left_out("pub fn tensorcall::engine::Agent::call(&self) -> tensorcall::Result<()>"));
        assert!(is_left_out("impl core::fmt::Debug for tensorcall::engine::Agent"));
        assert!(is_left_out("impl core::convert::From<tensorcall::Error> for tensorcall::engine::PassError"));
        assert!(!is_left_out("impl tensorcall::engine::Handler for tensorcall::Agent"));
        assert!(!is_left_out("pub fn tensorcall::Agent::over(&self, tensorcall::engine::Agent)"));
        assert!(!is_left_out("pub use tensorcall::DType"));
    }
}
