//! A store in a file that processes share: those of one host, or of several with a file system that locks.
//!
//! The file is a journal: each record is a key and its new value, both a `u32` length and that many bytes; a
//! key that is removed is recorded with a `-` in front. Keys of users begin with a `/`. It is written under an
//! exclusive `flock`, so that operations happen as a whole. This is what PyTorch's `FileStore` does, so
//! both may share a file; the participants are counted as it does, and the last one removes the file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use tensorcall_proto::store::{StoreFault, Table};

use super::{Store, StoreError};
use crate::clock::{now, pause};
use crate::fork::Home;
use crate::sync::Mutex;

/// How long another process may hold the lock.
const LOCK_LIMIT: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Largest journal that is read.
const MAX_JOURNAL: u64 = 256 << 20;

const PARTICIPANTS: &str = "refcount/";
const LEFT: &str = "cleanup/";

/// A store in a file, see the module.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    participants: Option<u32>,
    seen: Mutex<Seen>,
    home: Home,
}

/// What has been read of the file.
#[derive(Debug)]
struct Seen {
    table: Table,
    /// Which file it was, and how much of it.
    file: (u64, u64),
    end: u64,
}

impl FileStore {
    /// Opens the store in the file at `path`, which is made if it is not there.
    ///
    /// The last of so many `participants` to let go of it removes the file; without a number it stays.
    ///
    /// # Errors
    ///
    /// [`StoreError::Io`] if the file cannot be made, read or locked, or is none of a store.
    pub fn open(path: impl AsRef<Path>, participants: Option<u32>) -> Result<Self, StoreError> {
        let path = path.as_ref().to_owned();
        let seen = Mutex::new(Seen { table: Table::new(usize::MAX), file: (0, 0), end: 0 });
        let store = Self { path, participants, seen, home: Home::here() };
        store.change(|journal| journal.add(PARTICIPANTS, 1))?;
        Ok(store)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `run` on the current state, under the lock; what it records is written.
    fn change<R>(
        &self,
        run: impl FnOnce(&mut Journal<'_>) -> Result<R, StoreFault>,
    ) -> Result<R, StoreError> {
        self.with_file(FlockOperation::NonBlockingLockExclusive, |seen, file| {
            let mut journal = Journal { table: &mut seen.table, records: Vec::new() };
            let result = run(&mut journal);
            let records = journal.records;
            if !records.is_empty() {
                // What a writer that died left behind the last whole record is no record.
                file.set_len(seen.end)?;
                file.seek(SeekFrom::Start(seen.end))?;
                file.write_all(&records)?;
                seen.end += records.len() as u64;
            }
            Ok(result)
        })?
        .map_err(|fault| StoreError::Io(format!("{}: {fault}", self.path.display())))
    }

    fn look<R>(&self, run: impl FnOnce(&Table) -> R) -> Result<R, StoreError> {
        self.with_file(FlockOperation::NonBlockingLockShared, |seen, _| Ok(run(&seen.table)))
    }

    fn with_file<R>(
        &self,
        lock: FlockOperation,
        run: impl FnOnce(&mut Seen, &mut File) -> io::Result<R>,
    ) -> Result<R, StoreError> {
        if !self.home.is_here() {
            return Err(StoreError::Forked);
        }
        let mut seen = self.seen.lock();
        let result = self.locked(lock).and_then(|mut file| {
            seen.catch_up(&mut file)?;
            run(&mut seen, &mut file)
        });
        result.map_err(|error| StoreError::io(self.path.display(), error))
    }

    /// The file, locked until it is dropped.
    fn locked(&self, lock: FlockOperation) -> io::Result<File> {
        let limit = now() + LOCK_LIMIT;
        loop {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).open(&self.path)?;
            match flock(&file, lock) {
                // The last participant may have removed it meanwhile.
                Ok(()) if is_at(&file, &self.path) => return Ok(file),
                Ok(()) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) if now() < limit => pause(LOOK_EVERY / 10),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn leave(&self) -> Result<(), StoreError> {
        let (left, still_here) =
            self.change(|journal| Ok((journal.add(LEFT, 1)?, journal.add(PARTICIPANTS, -1)?)))?;
        if still_here == 0 && self.participants.is_some_and(|count| left >= count.into()) {
            fs::remove_file(&self.path).map_err(|error| StoreError::io(self.path.display(), error))?;
        }
        Ok(())
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        if self.home.is_here()
            && let Err(error) = self.leave()
        {
            tracing::debug!(%error, "leaving a store");
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let id = |metadata: io::Result<fs::Metadata>| metadata.ok().map(|is| (is.dev(), is.ino()));
    let this = id(file.metadata());
    this.is_some() && this == id(fs::metadata(path))
}

impl Seen {
    /// Reads what others have written.
    fn catch_up(&mut self, file: &mut File) -> io::Result<()> {
        let metadata = file.metadata()?;
        let which = (metadata.dev(), metadata.ino());
        if which != self.file || metadata.len() < self.end {
            *self = Self { table: Table::new(usize::MAX), file: which, end: 0 };
        }
        if metadata.len() > MAX_JOURNAL {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is too large for a store"));
        }
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(self.end))?;
        file.take(MAX_JOURNAL).read_to_end(&mut bytes)?;
        let mut rest = &bytes[..];
        while let Some((key, value)) = take_record(&mut rest) {
            if let Some(removed) = key.strip_prefix(b"-") {
                self.table.delete(removed);
            } else {
                let set = self.table.set(key.to_vec(), value.to_vec());
                set.map_err(io::Error::other)?;
            }
        }
        self.end += (bytes.len() - rest.len()) as u64;
        Ok(())
    }
}

/// The next whole record.
fn take_record<'a>(bytes: &mut &'a [u8]) -> Option<(&'a [u8], &'a [u8])> {
    let mut rest = *bytes;
    let record = (take_text(&mut rest)?, take_text(&mut rest)?);
    *bytes = rest;
    Some(record)
}

fn take_text<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, rest) = bytes.split_first_chunk()?;
    let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
    let (text, rest) = rest.split_at_checked(len)?;
    *bytes = rest;
    Some(text)
}

/// The state under the exclusive lock, and what is new in it.
struct Journal<'a> {
    table: &'a mut Table,
    records: Vec<u8>,
}

impl Journal<'_> {
    fn record(&mut self, key: &[u8], value: &[u8]) -> Result<(), StoreFault> {
        for text in [key, value] {
            let len = u32::try_from(text.len()).map_err(|_| StoreFault::Full { limit: u32::MAX as usize })?;
            self.records.extend(len.to_le_bytes());
            self.records.extend_from_slice(text);
        }
        Ok(())
    }

    /// Records what a key has now.
    fn note(&mut self, key: &str) -> Result<(), StoreFault> {
        let value = self.table.get(key.as_bytes()).unwrap_or_default().to_vec();
        self.record(key.as_bytes(), &value)
    }

    fn add(&mut self, key: &str, delta: i64) -> Result<i64, StoreFault> {
        let sum = self.table.add(key.into(), delta)?;
        self.note(key)?;
        Ok(sum)
    }
}

/// A key of a user.
fn full(key: &str) -> String {
    format!("/{key}")
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let key = full(key);
        self.change(|journal| {
            journal.table.set(key.clone().into(), value.into())?;
            journal.note(&key)
        })
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let key = full(key);
        self.look(|table| table.get(key.as_bytes()).map(<[u8]>::to_vec))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, StoreError> {
        let key = full(key);
        self.change(|journal| {
            let before = journal.table.get(key.as_bytes()).map(<[u8]>::to_vec);
            let found = journal.table.compare_set(key.clone().into(), expected.into(), desired.into())?;
            if journal.table.get(key.as_bytes()) != before.as_deref() {
                journal.note(&key)?;
            }
            Ok(found)
        })
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        let number = full(key);
        let sum = self.change(|journal| match journal.add(&number, delta) {
            Err(StoreFault::NotANumber(_)) => Ok(None),
            sum => sum.map(Some),
        })?;
        sum.ok_or_else(|| StoreError::NotANumber { key: key.to_owned() })
    }

    fn append(&self, key: &str, more: &[u8]) -> Result<(), StoreError> {
        let key = full(key);
        self.change(|journal| {
            journal.table.append(key.clone().into(), more)?;
            journal.note(&key)
        })
    }

    fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        self.look(|table| keys.iter().all(|key| table.has(full(key).as_bytes())))
    }

    fn wait(&self, keys: &[&str], limit: Option<Instant>) -> Result<(), StoreError> {
        while !self.check(keys)? {
            if limit.is_some_and(|limit| now() >= limit) {
                return Err(StoreError::timeout(keys));
            }
            pause(LOOK_EVERY);
        }
        Ok(())
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        let key = full(key);
        self.change(|journal| {
            let was_there = journal.table.delete(key.as_bytes());
            if was_there {
                journal.record(format!("-{key}").as_bytes(), b"")?;
            }
            Ok(was_there)
        })
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>, StoreError> {
        let value = |table: &Table, key: &str| table.get(full(key).as_bytes()).unwrap_or_default().to_vec();
        self.look(|table| keys.iter().map(|key| value(table, key)).collect())
    }
}
