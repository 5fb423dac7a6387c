//! How many tests passed, summed over runners that each say it in their own way.

use std::{fmt, fs, ops::AddAssign, path::Path};

/// Counts of tests. Prints as the closing line `N passed, M failed, K skipped`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
}

impl Tally {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Tally::default()
    }

    /// Counts in a JUnit report, as nextest and pytest write it; nothing if there is no such file.
    pub(crate) fn from_junit(file: &Path) -> Self {
        Self::parse_junit(&fs::read_to_string(file).unwrap_or_default())
    }

    fn parse_junit(xml: &str) -> Self {
        let mut tally = Tally::default();
        for suite in xml.split("<testsuite ").skip(1) {
            let element = suite.split('>').next().unwrap_or_default();
            let count = |name: &str| attribute(element, name).unwrap_or(0);
            let failed = count("failures") + count("errors");
            let skipped = count("skipped") + count("disabled");
            let passed = count("tests").saturating_sub(failed + skipped);
            tally += Tally { passed, failed, skipped };
        }
        tally
    }

    /// Counts in a closing line of libtest, such as `test result: ok. 7 passed; 0 failed; 2 ignored; …`.
    pub(crate) fn from_libtest(line: &str) -> Option<Self> {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let count = |word: &str| {
            let number = counts.split("; ").find_map(|part| part.strip_suffix(word));
            number.and_then(|number| number.trim().parse().ok())
        };
        let (passed, failed, skipped) = (count("passed")?, count("failed")?, count("ignored")?);
        Some(Tally { passed, failed, skipped })
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

fn attribute(element: &str, name: &str) -> Option<u32> {
    let (_, rest) = element.split_once(&format!(" {name}=\""))?;
    rest.split('"').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn junit_report_of_pytest_is_counted() {
        let xml = r#"<testsuites name="pytest tests"><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="1.0">"#;

        assert_eq!(Tally::parse_junit(xml), Tally { passed: 4, failed: 3, skipped: 3 });
    }

    #[test]
    fn junit_report_of_nextest_is_counted_suite_by_suite() {
        let xml = r#"<testsuites name="nextest-run" tests="5" failures="1" errors="0">
            <testsuite name="a" tests="3" disabled="0" errors="0" failures="1"></testsuite>
            <testsuite name="b" tests="2" disabled="0" errors="0" failures="0"></testsuite>"#;

        assert_eq!(Tally::parse_junit(xml), Tally { passed: 4, failed: 1, skipped: 0 });
    }

    #[test]
    fn closing_line_of_libtest_is_counted() {
        let line =
            "test result: ok. 7 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.5s";

        assert_eq!(Tally::from_libtest(line), Some(Tally { passed: 7, failed: 0, skipped: 2 }));
        assert_eq!(Tally::from_libtest("running 7 tests"), None);
    }
}
