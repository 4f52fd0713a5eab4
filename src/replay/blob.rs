//! The format of a saved slot: what stands where, and what a valid one cannot be. docs/ABI.md describes it for others.
//!
//! A head of 80 bytes, entries of 48 bytes that say what the blob is for, a payload, and a checksum over all of that. Numbers are
//! little-endian.

use std::ops::Range;

use super::config::{DeltaKind, Family, HeadMap, PoolConfig, SlotsConfig};
use super::position::{MAX_POSITION, Rule};
use crate::error::{Error, Result};
use crate::memory::collected;

/// What a blob begins with.
pub const MAGIC: [u8; 8] = *b"RSSMBLOB";
/// The one version so far.
pub const VERSION: u32 = 1;
const HEAD_BYTES: usize = 80;
const ENTRY_WORDS: usize = 12;
const ENTRY_BYTES: usize = ENTRY_WORDS * 4;
const CHECKSUM_BYTES: usize = 4;

/// What is saved. The numbers are those of the C interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Checkpoint, ring and position as they are: for the same configuration.
    Live = 0,
    /// The states at the position: for any configuration of layers of the same shapes.
    Portable = 1,
    /// What a checkpoint without a ring consists of: for pools of the same shapes and formats.
    Stored = 2,
}

/// An entry: family, layers, and what else must agree, in the order of [`names`].
pub type Entry = [u32; ENTRY_WORDS];

/// What a blob is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Purpose {
    /// What was saved.
    pub kind: Kind,
    /// Window, longest step, tokens that can be taken back, schedule; zero but in a live blob.
    pub rule: [u32; 4],
    /// LIVE, STORED: a pool each. PORTABLE: a shape of layers each, in ascending order.
    pub entries: Vec<Entry>,
}

const RULE_NAMES: [&str; 4] = ["window", "max_step_tokens", "min_rewind", "schedule"];

/// Names of an entry's words, as the header spells them.
fn names(kind: Kind, family: u32) -> [&'static str; ENTRY_WORDS] {
    let dims = match (kind, family) {
        (Kind::Live, 1) => ["nheads", "headdim", "dstate", "ngroups"],
        (_, 4) => ["channels", "width", "reserved", "reserved"],
        (Kind::Live, _) => ["HV", "V", "K", "H"],
        (_, _) => ["heads", "rows", "columns", "reserved"],
    };
    let [a, b, c, d] = dims;
    ["family", "n_layers", "io", "format", "readout", "stochastic_rounding", "u_dtype", "head_map", a, b, c, d]
}

fn family_number(family: &Family) -> u32 {
    match family {
        Family::Mamba2(_) => 1,
        Family::Delta(d) if d.kind == DeltaKind::Gdn => 2,
        Family::Delta(_) => 3,
        Family::Conv1d(_) => 4,
    }
}

/// All that decides how a pool's memory is laid out and what it means.
pub fn pool_entry(pool: &PoolConfig) -> Entry {
    let family = family_number(&pool.family);
    let (dims, head_map) = match &pool.family {
        Family::Mamba2(d) => ([d.nheads, d.headdim, d.dstate, d.ngroups], HeadMap::Grouped),
        Family::Delta(d) => ([d.v_heads, d.v, d.k, d.qk_heads], d.head_map),
        Family::Conv1d(c) => ([c.channels, c.width, 0, 0], HeadMap::Grouped),
    };
    let [a, b, c, d] = dims.map(|dim| dim as u32);
    let u_dtype = if matches!(pool.family, Family::Delta(_)) { pool.u_dtype as u32 } else { 0 };
    let [format, readout] = if family == 4 { [0, 0] } else { [pool.format as u32, pool.readout as u32] };
    let (layers, io) = (pool.n_layers as u32, pool.io as u32);
    [family, layers, io, format, readout, pool.stochastic.into(), u_dtype, head_map as u32, a, b, c, d]
}

/// The shape of a layer of a pool, in an entry without layers.
pub fn shape_entry(pool: &PoolConfig) -> Entry {
    let family = family_number(&pool.family);
    match (&pool.family, pool.family.state()) {
        (Family::Conv1d(c), _) => [family, 0, pool.io as u32, 0, 0, 0, 0, 0, c.channels as u32, c.width as u32, 0, 0],
        (_, Some(s)) => [family, 0, 0, 0, 0, 0, 0, 0, s.heads as u32, s.rows as u32, s.columns as u32, 0],
        (_, None) => [family, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    }
}

/// What decides the bytes of a pool's checkpoints and stored windows.
pub fn stored_entry(pool: &PoolConfig) -> Entry {
    let mut entry = shape_entry(pool);
    let [_, n_layers, _, format, ..] = &mut entry;
    *n_layers = pool.n_layers as u32;
    *format = if pool.family.state().is_some() { pool.format as u32 } else { 0 };
    entry
}

impl Purpose {
    /// Of a blob for exactly these pools.
    pub fn live<'a>(slots: &SlotsConfig, pools: impl Iterator<Item = &'a PoolConfig>) -> Self {
        let rule = [slots.window as u32, slots.max_step_tokens as u32, slots.min_rewind as u32, slots.schedule as u32];
        Purpose { kind: Kind::Live, rule, entries: pools.map(pool_entry).collect() }
    }

    /// Bytes in front of the payload.
    pub fn head_bytes(&self) -> usize {
        HEAD_BYTES + self.entries.len() * ENTRY_BYTES
    }

    /// Bytes of a whole blob with so long a payload.
    pub fn blob_bytes(&self, payload: u64) -> u64 {
        payload.saturating_add((self.head_bytes() + CHECKSUM_BYTES) as u64)
    }
}

/// Of the ring that was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Committed tokens.
    pub position: i64,
    /// Where the schedule wants a fold; 0 in a portable blob.
    pub flush_before: i64,
    /// Key of stochastic rounding.
    pub seed: u64,
    /// At the time; a restore sets another.
    pub generation: u32,
}

/// Writes everything in front of the payload of a blob of its size.
pub fn write_head(blob: &mut [u8], purpose: &Purpose, ring: &Ring) {
    let bytes = blob.len() as u64;
    let mut words = Words { blob, at: 0 };
    words.extend(MAGIC);
    words.extend(VERSION.to_le_bytes());
    words.extend((purpose.kind as u32).to_le_bytes());
    words.extend(bytes.to_le_bytes());
    words.extend(ring.position.to_le_bytes());
    words.extend(ring.flush_before.to_le_bytes());
    words.extend(ring.seed.to_le_bytes());
    words.extend(ring.generation.to_le_bytes());
    for word in purpose.rule {
        words.extend(word.to_le_bytes());
    }
    words.extend((purpose.entries.len() as u32).to_le_bytes());
    words.extend(0u64.to_le_bytes());
    for word in purpose.entries.iter().flatten() {
        words.extend(word.to_le_bytes());
    }
}

/// Writes one word behind the other.
struct Words<'a> {
    blob: &'a mut [u8],
    at: usize,
}

impl Words<'_> {
    fn extend<const N: usize>(&mut self, word: [u8; N]) {
        if let Some(to) = self.blob.get_mut(self.at..self.at + N) {
            to.copy_from_slice(&word);
        }
        self.at += N;
    }
}

/// The payload of a blob.
pub fn payload_mut<'a>(blob: &'a mut [u8], purpose: &Purpose) -> &'a mut [u8] {
    let end = blob.len().saturating_sub(CHECKSUM_BYTES);
    blob.get_mut(purpose.head_bytes()..end).unwrap_or_default()
}

/// Writes the checksum.
pub fn seal(blob: &mut [u8]) {
    if let Some((all, checksum)) = blob.split_last_chunk_mut::<CHECKSUM_BYTES>() {
        *checksum = crc32fast::hash(all).to_le_bytes();
    }
}

/// A blob that is whole.
#[derive(Debug)]
pub struct Opened<'a> {
    /// What it is for.
    pub purpose: Purpose,
    /// Of the ring.
    pub ring: Ring,
    /// The payload.
    pub payload: &'a [u8],
}

/// Numbers of a head, one behind the other.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn u32(&mut self) -> u32 {
        match self.0.split_first_chunk::<4>() {
            Some((number, rest)) => {
                self.0 = rest;
                u32::from_le_bytes(*number)
            }
            None => 0,
        }
    }

    fn u64(&mut self) -> u64 {
        let low = self.u32();
        u64::from(low) | u64::from(self.u32()) << 32
    }
}

/// The kind that a blob says it is, before anything of it is believed.
pub fn kind_of(blob: &[u8]) -> Kind {
    match blob.get(12..16) {
        Some([1, 0, 0, 0]) => Kind::Portable,
        Some([2, 0, 0, 0]) => Kind::Stored,
        _ => Kind::Live,
    }
}

/// Reads a blob's head, and checks that the blob is whole and unchanged.
pub fn open(blob: &[u8]) -> Result<Opened<'_>> {
    let least = HEAD_BYTES + CHECKSUM_BYTES;
    if blob.len() < least {
        return Err(Error::bad_blob("bytes", blob.len(), format!("{least} or more, because a blob has a head")));
    }
    let Some((magic, rest)) = blob.split_first_chunk::<8>() else {
        return Err(Error::Internal("a blob without a head".into()));
    };
    if *magic != MAGIC {
        let seen: String = magic.iter().map(|byte| format!("{byte:02x}")).collect();
        return Err(Error::bad_blob("the blob's magic", seen, "that of a blob that this library saved"));
    }
    let mut reader = Reader(rest);
    let version = reader.u32();
    if version != VERSION {
        return Err(Error::bad_blob(
            "the blob's version",
            version,
            format!("{VERSION}, the one that this library reads"),
        ));
    }
    let kind = reader.u32();
    let bytes = reader.u64();
    if bytes != blob.len() as u64 {
        return Err(Error::bad_blob("bytes", blob.len(), format!("{bytes}, the length that the blob's head says")));
    }
    let checksum = blob.split_last_chunk::<CHECKSUM_BYTES>();
    if let Some((all, found)) = checksum {
        let (found, wanted) = (u32::from_le_bytes(*found), crc32fast::hash(all));
        if found != wanted {
            return Err(Error::bad_blob(
                "the blob's checksum",
                format!("{found:08x}"),
                format!("{wanted:08x}, that of its contents: some of them have changed"),
            ));
        }
    }
    let kind = match kind {
        0 => Kind::Live,
        1 => Kind::Portable,
        2 => Kind::Stored,
        other => return Err(Error::bad_blob("the blob's kind", other, "one of REPLAYSSM_SAVE_*")),
    };
    let ring = Ring {
        position: reader.u64() as i64,
        flush_before: reader.u64() as i64,
        seed: reader.u64(),
        generation: reader.u32(),
    };
    let rule = std::array::from_fn(|_| reader.u32());
    let n_entries = reader.u32() as usize;
    let reserved = reader.u64();
    if reserved != 0 {
        return Err(Error::bad_blob("the blob's reserved bytes", reserved, "0"));
    }
    if n_entries > (blob.len() - least) / ENTRY_BYTES {
        return Err(Error::bad_blob("the blob's number of entries", n_entries, "as many as it has room for"));
    }
    if !(0..=MAX_POSITION).contains(&ring.position) {
        return Err(Error::bad_blob("the blob's position", ring.position, format!("0 to {MAX_POSITION}")));
    }
    // No schedule looks further ahead than a window.
    if !(0..=MAX_POSITION + 256).contains(&ring.flush_before) {
        return Err(Error::bad_blob("the blob's flush_before", ring.flush_before, format!("0 to {MAX_POSITION}")));
    }
    // What a kind does not have is zero, so that a later version may give it a meaning.
    for (name, value, has) in [
        ("flush_before", ring.flush_before as u64, kind == Kind::Live),
        ("seed", ring.seed, kind != Kind::Stored),
        ("generation", ring.generation.into(), kind != Kind::Stored),
    ] {
        if !has && value != 0 {
            return Err(Error::bad_blob(format!("the blob's {name}"), value, format!("0 in a {kind:?} one")));
        }
    }
    let entry = |_| std::array::from_fn(|_| reader.u32());
    let entries = collected("what a blob is for", n_entries, (0..n_entries).map(entry))?;
    let purpose = Purpose { kind, rule, entries };
    let payload = blob.get(purpose.head_bytes()..blob.len() - CHECKSUM_BYTES).unwrap_or_default();
    Ok(Opened { purpose, ring, payload })
}

impl Opened<'_> {
    /// Refuses a blob for something else than `ours`, by the name of what differs.
    pub fn check_purpose(&self, ours: &Purpose) -> Result<()> {
        let theirs = &self.purpose;
        for ((name, their), our) in RULE_NAMES.iter().zip(theirs.rule).zip(ours.rule) {
            if their != our {
                return Err(Error::bad_blob(
                    format!("the blob's {name}"),
                    their,
                    format!("{our}, as the slots handle has"),
                ));
            }
        }
        let live = theirs.kind != Kind::Portable;
        if theirs.entries.len() != ours.entries.len() {
            let what = if live { "number of pools" } else { "number of shapes of layers" };
            let (their, our) = (theirs.entries.len(), ours.entries.len());
            return Err(Error::bad_blob(format!("the blob's {what}"), their, format!("{our}, as on the slots handle")));
        }
        for (i, (their, our)) in theirs.entries.iter().zip(&ours.entries).enumerate() {
            let [family, ..] = *their;
            for ((name, their), our) in names(theirs.kind, family).iter().zip(their).zip(our) {
                if their != our {
                    let part = if live { "pool" } else { "shape" };
                    return Err(Error::bad_blob(
                        format!("{name} of the blob's {part} {i}"),
                        their,
                        format!("{our}, as on the slots handle"),
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Tags as they lie in memory and in a blob.
pub fn tags(bytes: &[u8]) -> impl Iterator<Item = i64> + '_ {
    bytes.as_chunks::<8>().0.iter().map(|tag| i64::from_le_bytes(*tag))
}

/// The oldest tag of one layer, or one that cannot be: outside the window, or past the position.
pub fn oldest(rule: &Rule, position: i64, is_conv: bool, layer: &[u8]) -> std::result::Result<i64, i64> {
    let mut oldest = position;
    for tag in tags(layer) {
        let valid = if is_conv { rule.conv_tag_is_valid(position, tag) } else { rule.tag_is_valid(position, tag) };
        if !valid {
            return Err(tag);
        }
        oldest = oldest.min(tag);
    }
    Ok(oldest)
}

/// Turns all records but those of `live` tokens into zeros: they may hold what another request left, or a step that was not committed.
pub fn clear_records(part: &mut [u8], (blocks, rows): (usize, usize), live: Range<i64>) {
    let record = part.len() / (blocks * rows).max(1);
    if record == 0 {
        return;
    }
    let held = (live.end - live.start).max(0);
    for block in part.chunks_exact_mut(rows * record) {
        for (row, bytes) in block.chunks_exact_mut(record).enumerate() {
            // How far behind the first live token's row this one comes.
            let behind = (row as i64 - live.start.rem_euclid(rows as i64)).rem_euclid(rows as i64);
            if behind >= held {
                bytes.fill(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn purpose() -> Purpose {
        Purpose { kind: Kind::Live, rule: [16, 4, 2, 0], entries: vec![[1; 12], [2; 12]] }
    }

    fn sample() -> Vec<u8> {
        let purpose = purpose();
        let mut blob = vec![0; purpose.blob_bytes(40) as usize];
        payload_mut(&mut blob, &purpose).copy_from_slice(&std::array::from_fn::<u8, 40, _>(|i| i as u8));
        write_head(&mut blob, &purpose, &Ring { position: 77, flush_before: 80, seed: 5, generation: 3 });
        seal(&mut blob);
        blob
    }

    #[test]
    fn what_was_written_is_read() {
        let blob = sample();
        let opened = open(&blob).unwrap();
        assert_eq!(opened.purpose, purpose());
        assert_eq!(opened.ring, Ring { position: 77, flush_before: 80, seed: 5, generation: 3 });
        assert_eq!(opened.payload, (0..40).collect::<Vec<u8>>());
        opened.check_purpose(&purpose()).unwrap();
    }

    #[test]
    fn every_flipped_byte_and_every_length_is_refused() {
        let blob = sample();
        for at in 0..blob.len() {
            for flip in [1, 0x80, 0xFF] {
                let mut changed = blob.clone();
                changed[at] ^= flip;
                assert!(matches!(open(&changed), Err(Error::BadBlob { .. })), "byte {at}");
            }
            assert!(matches!(open(&blob[..at]), Err(Error::BadBlob { .. })), "{at} bytes");
        }
        let mut longer = blob;
        longer.push(0);
        assert!(open(&longer).is_err());
    }

    #[test]
    fn what_no_blob_has_is_refused_even_with_a_right_checksum() {
        let change = |at: usize, bytes: &[u8]| {
            let mut blob = sample();
            blob[at..at + bytes.len()].copy_from_slice(bytes);
            seal(&mut blob);
            open(&blob).unwrap_err().to_string()
        };
        assert!(change(8, &[2]).starts_with("the blob's version is 2; expected 1"));
        assert!(change(12, &[9]).starts_with("the blob's kind is 9;"));
        assert!(change(24, &(-1i64).to_le_bytes()).starts_with("the blob's position is -1;"));
        assert!(change(24, &(MAX_POSITION + 1).to_le_bytes()).starts_with("the blob's position is "));
        assert!(change(32, &(-1i64).to_le_bytes()).starts_with("the blob's flush_before is -1;"));
        assert!(change(68, &3u32.to_le_bytes()).starts_with("the blob's number of entries is 3;"));
        assert!(change(68, &u32::MAX.to_le_bytes()).starts_with("the blob's number of entries is "));
        assert!(change(72, &[1]).starts_with("the blob's reserved bytes is 1;"));
        // The same head as that of another kind, which has no first fold, or no ring at all.
        assert!(change(12, &[1]).starts_with("the blob's flush_before is 80; expected 0 in a Portable one"));
        let stored = |ring: [u64; 3]| {
            let [flush_before, seed, generation] = ring.map(u64::to_le_bytes);
            change(
                12,
                &[
                    &[2, 0, 0, 0],
                    &(sample().len() as u64).to_le_bytes()[..],
                    &77u64.to_le_bytes(),
                    &flush_before,
                    &seed,
                    &generation[..4],
                ]
                .concat(),
            )
        };
        assert!(stored([3, 0, 0]).starts_with("the blob's flush_before is 3;"));
        assert!(stored([0, 4, 0]).starts_with("the blob's seed is 4; expected 0 in a Stored one"));
        assert!(stored([0, 0, 5]).starts_with("the blob's generation is 5;"));
    }

    #[test]
    fn a_mismatch_is_named() {
        let blob = sample();
        let opened = open(&blob).unwrap();
        let said = |ours: Purpose| opened.check_purpose(&ours).unwrap_err().to_string();
        assert_eq!(
            said(Purpose { rule: [32, 4, 2, 0], ..purpose() }),
            "the blob's window is 16; expected 32, as the slots handle has"
        );
        let mut other = purpose();
        other.entries[1][3] = 9;
        assert_eq!(said(other), "format of the blob's pool 1 is 2; expected 9, as on the slots handle");
        other = purpose();
        other.entries.pop();
        assert_eq!(said(other), "the blob's number of pools is 2; expected 1, as on the slots handle");
    }

    #[test]
    fn records_outside_of_the_history_become_zero() {
        // Two blocks of five rows of two bytes; tokens 8 .. 10 live in rows 3, 4, 0.
        let mut part: Vec<u8> = (1..=20).collect();
        clear_records(&mut part, (2, 5), 8..11);
        assert_eq!(part, [1, 2, 0, 0, 0, 0, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0, 17, 18, 19, 20]);
        clear_records(&mut part, (2, 5), 8..8);
        assert!(part.iter().all(|&byte| byte == 0));
        // A window in front of position 0.
        let mut part = vec![1; 5];
        clear_records(&mut part, (1, 5), -2..1);
        assert_eq!(part, [1, 0, 0, 1, 1]);
    }
}
