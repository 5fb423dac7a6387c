//! Whether something in the environment was made from the sources as they are now.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::project::Project;

/// A file in the environment with the hash of what was built there.
pub(crate) struct Stamp {
    file: PathBuf,
    now: String,
}

impl Stamp {
    /// Hashes `sources`, files or directories below the root, and the place of the root.
    pub(crate) fn new(project: &Project, what: &str, sources: &[&str]) -> Result<Self> {
        let mut hasher = DefaultHasher::new();
        for source in sources {
            hash_tree(&project.root.join(source), &mut hasher)?;
        }
        let file = project.venv.join(format!("tensorcall-{what}.stamp"));
        Ok(Stamp { file, now: format!("{:016x}", hasher.finish()) })
    }

    pub(crate) fn is_fresh(&self) -> bool {
        fs::read_to_string(&self.file).is_ok_and(|then| then == self.now)
    }

    pub(crate) fn write(&self) -> Result<()> {
        Ok(fs::write(&self.file, &self.now)?)
    }
}

fn hash_tree(path: &Path, hasher: &mut DefaultHasher) -> Result<()> {
    path.hash(hasher);
    if !path.is_dir() {
        fs::read(path).with_context(|| path.display().to_string())?.hash(hasher);
        return Ok(());
    }
    let mut entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    entries.sort();
    entries.iter().try_for_each(|entry| hash_tree(entry, hasher))
}
