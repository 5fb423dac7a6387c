//! What workers say of their devices when they join, and what is wrong with it.
//!
//! Workers in Rust have none, but who leads a group checks what the others say, in the words of the Python package,
//! which are PyTorch's.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The device maps of a worker: by the name of a callee, and by device.
pub(super) type Maps = Ordered<Ordered<String>>;

/// What one worker says.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Devices {
    /// How many accelerators it has.
    count: u64,
    pub(super) maps: Maps,
    /// Those that it may use; none means all that its maps name.
    #[serde(rename = "devices")]
    listed: Vec<String>,
}

/// A JSON object whose order counts, since texts show it.
#[derive(Debug, Clone)]
pub(super) struct Ordered<T>(Vec<(String, T)>);

impl<T> Default for Ordered<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Ordered<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T: Serialize> Serialize for Ordered<T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> serde::de::Visitor<'de> for Pairs<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Ordered<T>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Ordered(pairs))
            }
        }
        deserializer.deserialize_map(Pairs(std::marker::PhantomData))
    }
}

/// What is wrong with what the workers of a group say; the first thing found.
pub(super) fn fault(group: &[(&str, &Devices)], is_static: bool) -> Option<String> {
    let said: BTreeMap<&str, &Devices> = group.iter().copied().collect();
    for (name, own) in group {
        let listed = devices(&own.listed);
        if listed.iter().collect::<BTreeSet<_>>().len() != listed.len() {
            return Some(format!("Node {name} has duplicated devices\ndevices = {}", list(&own.listed)));
        }
        if !exist(&listed, own.count) {
            return Some(format!(
                "Node {name} has devices with invalid indices\ndevices = {}\ndevice count = {}",
                list(&own.listed),
                own.count
            ));
        }
    }
    for (name, own) in group {
        if is_static && !own.maps.0.iter().all(|(to, _)| said.contains_key(to.as_str())) {
            let maps: Vec<_> = own.maps.0.iter().map(|(to, map)| format!("'{to}': {}", show(map))).collect();
            let names: Vec<_> = group.iter().map(|(name, _)| format!("'{name}'")).collect();
            return Some(format!(
                "Node {name} has invalid target node names in its device maps\ndevice maps = {{{}}}\nnode names = [{}]",
                maps.join(", "),
                names.join(", ")
            ));
        }
        let wrong = own.maps.0.iter().find_map(|(to, map)| fault_of_map(name, to, map, &said));
        if wrong.is_some() {
            return wrong;
        }
    }
    None
}

fn fault_of_map(
    name: &str,
    to: &str,
    map: &Ordered<String>,
    said: &BTreeMap<&str, &Devices>,
) -> Option<String> {
    let place = format!("in its device map for {to}\ndevice map = {}", show(map));
    let sources: Vec<_> = map.0.iter().map(|(source, _)| Device::parse(source)).collect();
    let targets: Vec<_> = map.0.iter().map(|(_, target)| Device::parse(target)).collect();
    if targets.iter().collect::<BTreeSet<_>>().len() != sources.len() {
        return Some(format!("Node {name} has duplicated target devices {place}"));
    }
    for (side, worker, used) in [("source", name, sources), ("target", to, targets)] {
        let Some(theirs) = said.get(worker) else { continue };
        let listed = devices(&theirs.listed);
        if !listed.is_empty() && !used.iter().all(|device| device.is_cpu() || listed.contains(device)) {
            return Some(format!(
                "Node {name} has unexpected {side} devices {place}\ndevices = {}",
                list(&theirs.listed)
            ));
        }
        if !exist(&used, theirs.count) {
            return Some(format!(
                "Node {name} has {side} devices with invalid indices {place}\ndevice count = {}",
                theirs.count
            ));
        }
    }
    None
}

/// A device, as `torch.device` is written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Device {
    kind: String,
    index: Option<u64>,
}

impl Device {
    fn parse(text: &str) -> Self {
        let (kind, index) = text.split_once(':').unwrap_or((text, ""));
        Self { kind: kind.to_owned(), index: index.parse().ok() }
    }

    fn is_cpu(&self) -> bool {
        self.kind == "cpu" && self.index.is_none()
    }

    /// As Python shows it.
    fn show(&self) -> String {
        match self.index {
            Some(index) => format!("device(type='{}', index={index})", self.kind),
            None => format!("device(type='{}')", self.kind),
        }
    }
}

fn devices(texts: &[String]) -> Vec<Device> {
    texts.iter().map(|text| Device::parse(text)).collect()
}

fn exist(devices: &[Device], count: u64) -> bool {
    devices.iter().all(|device| device.kind == "cpu" || device.index.unwrap_or(0) < count)
}

fn list(texts: &[String]) -> String {
    format!("[{}]", devices(texts).iter().map(Device::show).collect::<Vec<_>>().join(", "))
}

fn show(map: &Ordered<String>) -> String {
    let pairs = map.0.iter().map(|(from, to)| (Device::parse(from).show(), Device::parse(to).show()));
    format!("{{{}}}", pairs.map(|(from, to)| format!("{from}: {to}")).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Devices {
        serde_json::from_str(text).unwrap()
    }

    fn of_two(text: &str) -> Option<String> {
        fault(&[("w0", &said(text)), ("w1", &Devices::default())], true)
    }

    #[test]
    fn what_fits_is_no_fault() {
        assert_eq!(of_two(r#"{"count": 0, "maps": {}, "devices": []}"#), None);
        assert_eq!(of_two(r#"{"count": 1, "maps": {"w1": {"cuda:0": "cpu"}}, "devices": ["cuda:0"]}"#), None);
    }

    /// The same texts as those of `_devices.fault`.
    #[test]
    fn what_does_not_fit_is_told_in_pytorchs_words() {
        for (text, found) in [
            (
                r#"{"count": 2, "maps": {}, "devices": ["cuda:0", "cuda:0"]}"#,
                "Node w0 has duplicated devices\ndevices = [device(type='cuda', index=0), device(type='cuda', index=0)]",
            ),
            (
                r#"{"count": 0, "maps": {}, "devices": ["cuda:0"]}"#,
                "Node w0 has devices with invalid indices\ndevices = [device(type='cuda', index=0)]\ndevice count = 0",
            ),
            (
                r#"{"count": 0, "maps": {"x": {"cpu": "cpu"}}, "devices": []}"#,
                "Node w0 has invalid target node names in its device maps\n\
                 device maps = {'x': {device(type='cpu'): device(type='cpu')}}\nnode names = ['w0', 'w1']",
            ),
            (
                r#"{"count": 0, "maps": {"w1": {"cpu": "cuda:0"}}, "devices": []}"#,
                "Node w0 has target devices with invalid indices in its device map for w1\n\
                 device map = {device(type='cpu'): device(type='cuda', index=0)}\ndevice count = 0",
            ),
        ] {
            assert_eq!(of_two(text).as_deref(), Some(found));
        }
    }
}
