//! `cargo xtask licences`: the licences of the crates that are linked into the extension, in one file.
//!
//! A wheel has those crates in it without their sources, so their texts go along ([`FILE`] is among
//! pyproject.toml's `license-files`). The file is kept in the repository, since `pip install .` makes
//! wheels too; [`check`] says when it no longer fits `Cargo.lock`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{plan::Plan, process::output, project::Project};

/// Where the texts are, from the root.
const FILE: &str = "LICENSE-THIRD-PARTY";
/// Those of other platforms bring nothing that this one lacks but crates of Windows and macOS.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";
const EXTENSION: &str = "tensorcall-python";
const HEAD: &str = "Licences of others\n\nThe extension module in wheels of tensorcall contains the Rust crates \
                    below, and Rust's standard library.\nEach text stands under the crates that it covers. \
                    Written by `cargo xtask licences`.\n";
const STANDARD_LIBRARY: &str = "Rust's standard library (MIT OR Apache-2.0)";

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("licences of linked crates", |_| Ok(fs::write(project.root.join(FILE), collect(project)?)?));
}

/// Fails if the file is not what [`collect`] makes now.
pub(crate) fn check(project: &Project) -> Result<()> {
    let there = fs::read_to_string(project.root.join(FILE)).unwrap_or_default();
    ensure!(there == collect(project)?, "{FILE} does not fit Cargo.lock: run `cargo xtask licences`");
    Ok(())
}

fn collect(project: &Project) -> Result<String> {
    let mut covered: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in linked(&metadata(project)?)? {
        for text in package.texts()? {
            covered.entry(text).or_default().insert(package.title.clone());
        }
    }
    let ours = fs::read_to_string(project.root.join("LICENSE-MIT"))?;
    covered.entry(of_standard_library(&ours)).or_default().insert(STANDARD_LIBRARY.to_owned());
    let mut by_crate: Vec<_> = covered.into_iter().map(|(text, crates)| (crates, text)).collect();
    by_crate.sort();
    let mut file = HEAD.to_owned();
    for (crates, text) in by_crate {
        let titles: Vec<_> = crates.into_iter().collect();
        let _ = write!(file, "\n{}\n{}\n\n{}\n", "=".repeat(80), titles.join("\n"), text.trim());
    }
    Ok(file)
}

fn metadata(project: &Project) -> Result<Value> {
    let args = ["metadata", "--format-version", "1", "--locked", "--filter-platform", PLATFORM];
    Ok(serde_json::from_str(&output(&mut project.cargo(&args))?)?)
}

/// A crate of others that is linked into the extension.
struct Package {
    /// Name, version and licence expression.
    title: String,
    licence: String,
    folder: PathBuf,
}

impl Package {
    /// The licence texts that lie in the crate; where there is a choice, the MIT one stands for all.
    fn texts(&self) -> Result<Vec<String>> {
        let mut files = licence_files(&self.folder)?;
        let is_apache = |file: &PathBuf| name_of(file).contains("APACHE");
        if self.licence.contains("MIT") && self.licence.contains("OR") && !files.iter().all(is_apache) {
            files.retain(|file| !is_apache(file));
        }
        ensure!(!files.is_empty(), "{} has no licence text in {}", self.title, self.folder.display());
        files.iter().map(|file| Ok(fs::read_to_string(file)?.replace('\r', ""))).collect()
    }
}

fn licence_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = name_of(&path);
        let known = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
        if path.is_file() && known.iter().any(|word| name.starts_with(word)) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().to_uppercase()).unwrap_or_default()
}

/// Follows the ordinary dependencies of the extension; macros and build scripts leave nothing in it.
fn linked(metadata: &Value) -> Result<Vec<Package>> {
    let packages = by_id(&metadata["packages"]);
    let nodes = by_id(&metadata["resolve"]["nodes"]);
    let root = packages.values().find(|package| package["name"] == EXTENSION);
    let mut ahead = vec![text(root.context("no extension in the workspace")?, "id")];
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    while let Some(id) = ahead.pop() {
        let package = packages.get(id).context("a dependency without a package")?;
        if !seen.insert(id) || is_macro(package) {
            continue;
        }
        for dependency in nodes.get(id).map(|node| list(&node["deps"])).unwrap_or_default() {
            if list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null()) {
                ahead.push(text(dependency, "pkg"));
            }
        }
        if !package["source"].is_null() {
            found.push(Package {
                title: format!(
                    "{} {} ({})",
                    text(package, "name"),
                    text(package, "version"),
                    text(package, "license")
                ),
                licence: text(package, "license").to_owned(),
                folder: Path::new(text(package, "manifest_path"))
                    .parent()
                    .map(Path::to_owned)
                    .unwrap_or_default(),
            });
        }
    }
    Ok(found)
}

fn is_macro(package: &Value) -> bool {
    list(&package["targets"])
        .iter()
        .any(|target| list(&target["kind"]).iter().any(|kind| kind == "proc-macro"))
}

fn by_id(values: &Value) -> HashMap<&str, &Value> {
    list(values).iter().map(|value| (text(value, "id"), value)).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// The MIT licence with the copyright line of Rust's library in the place of ours.
fn of_standard_library(ours: &str) -> String {
    let swap = |line: &str| {
        let is_notice = line.starts_with("Copyright");
        if is_notice { "Copyright (c) The Rust Project Contributors".to_owned() } else { line.to_owned() }
    };
    ours.lines().map(swap).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn crates_that_are_linked_are_found_and_macros_and_build_scripts_are_not() {
        let package = |name: &str, kind: &str, source: Value| {
            json!({"id": name, "name": name, "version": "1", "license": "MIT", "source": source,
                   "manifest_path": "/x/Cargo.toml", "targets": [{"kind": [kind]}]})
        };
        let dependency = |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [
                package(EXTENSION, "cdylib", Value::Null),
                package("linked", "lib", json!("registry")),
                package("macros", "proc-macro", json!("registry")),
                package("builds", "lib", json!("registry")),
                package("deep", "lib", json!("registry")),
            ],
            "resolve": {"nodes": [
                {"id": EXTENSION, "deps": [dependency("linked", Value::Null), dependency("macros", Value::Null),
                                           dependency("builds", json!("build"))]},
                {"id": "linked", "deps": [dependency("deep", Value::Null)]},
            ]},
        });

        let found = linked(&metadata).unwrap();

        let titles: BTreeSet<_> = found.iter().map(|package| package.title.as_str()).collect();
        assert_eq!(titles, BTreeSet::from(["deep 1 (MIT)", "linked 1 (MIT)"]));
    }

    #[test]
    fn the_notice_of_the_standard_library_is_its_own() {
        let text = of_standard_library("MIT License\n\nCopyright (c) us\n\nPermission");

        assert_eq!(text, "MIT License\n\nCopyright (c) The Rust Project Contributors\n\nPermission");
    }
}
