//! The rule of positions: which records a checkpoint lacks, when they are folded, what a commit does.
//!
//! Pure functions of integers. Positions are absolute token counts; nothing here knows about memory.

use super::config::{Schedule, SlotsConfig};

/// The largest position that is accepted, so that sums of a position and a length never overflow.
pub const MAX_POSITION: i64 = 1 << 60;

/// The part of a slots handle's configuration that the rule needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// W: how many foldable records and tokens of a step a checkpoint may lag behind.
    pub window: i64,
    /// Committed tokens that no step folds, so that they can be taken back.
    pub keep: i64,
    /// T_max: the longest step.
    pub max_step_tokens: i64,
    /// When folds happen before they must.
    pub schedule: Schedule,
}

/// What a step sees of one row before it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepView {
    /// Committed tokens.
    pub position: i64,
    /// Where the checkpoint tile stands.
    pub tag: i64,
    /// Tokens that the step brings.
    pub tokens: i64,
    /// A fold is wanted once this position is committed and not kept; 0 = none.
    pub flush_before: i64,
    /// The row's flush mask.
    pub flush: bool,
}

impl Rule {
    /// The rule of a slots handle.
    pub fn new(config: &SlotsConfig) -> Self {
        Rule {
            window: config.window.into(),
            keep: config.min_rewind.into(),
            max_step_tokens: config.max_step_tokens.into(),
            schedule: config.schedule,
        }
    }

    /// Rows of a ring: `W + keep + T_max`.
    pub fn rows(&self) -> i64 {
        self.window + self.keep + self.max_step_tokens
    }

    /// The ring row of the record of token `position`.
    #[inline(always)]
    pub fn row(&self, position: i64) -> i64 {
        position.rem_euclid(self.rows())
    }

    /// Whether a tile's tag can be trusted at this position: `max(0, position - W - keep) <= tag <= position`.
    #[inline(always)]
    pub fn tag_is_valid(&self, position: i64, tag: i64) -> bool {
        (0..=MAX_POSITION).contains(&position) && tag <= position && tag >= (position - self.window - self.keep).max(0)
    }

    /// Whether the tag of a convolution's window can be trusted: every step leaves it within `keep + T_max` of the position.
    #[inline(always)]
    pub fn conv_tag_is_valid(&self, position: i64, tag: i64) -> bool {
        (0..=MAX_POSITION).contains(&position)
            && tag <= position
            && tag >= (position - self.keep - self.max_step_tokens).max(0)
    }

    /// How many records a step folds before it computes: never its own, never the last `keep` committed ones.
    #[inline(always)]
    pub fn folds(&self, v: StepView) -> i64 {
        let limit = v.position - self.keep;
        let foldable = limit - v.tag;
        if v.tokens == 0 || foldable <= 0 {
            return 0;
        }
        if v.flush {
            return foldable;
        }
        if v.tag < v.flush_before && v.flush_before <= limit {
            return foldable;
        }
        if self.schedule == Schedule::ByPosition {
            // What is left is shorter than a period, W - T_max + 1, so that the window never forces another fold.
            let period = self.period();
            let due = limit.div_euclid(period);
            return if due > v.tag.div_euclid(period) { due * period - v.tag } else { 0 };
        }
        if foldable + v.tokens > self.window { foldable } else { 0 }
    }

    /// Distance of the flush points of [`Schedule::ByPosition`]: `W - T_max + 1`.
    pub fn period(&self) -> i64 {
        self.window - self.max_step_tokens + 1
    }

    /// Where a request that starts at `position` on ring `ring` is to fold first: `position + 1 ..= position + W`, one
    /// value each for W neighbouring rings, and far apart for neighbours. 0, which is nowhere, unless staggered.
    pub fn flush_before(&self, position: i64, ring: i64) -> i64 {
        if self.schedule != Schedule::Staggered {
            return 0;
        }
        position + 1 + (ring.rem_euclid(self.window) * self.stagger()).rem_euclid(self.window)
    }

    /// A number coprime to W, near W times the golden section.
    fn stagger(&self) -> i64 {
        let mut step = (self.window * 618 / 1000).max(1);
        while gcd(step, self.window) != 1 {
            step += 1;
        }
        step
    }

    /// The lowest position whose convolution window a ring still holds after `tokens` records were written at
    /// `position`. The ring has `width - 1 + keep + T_max` rows.
    #[inline(always)]
    pub fn conv_held_from(&self, position: i64, tokens: i64) -> i64 {
        position + tokens - self.keep - self.max_step_tokens
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The default key of stochastic rounding: a mix of the ring's id.
pub fn default_seed(ring: i64) -> u64 {
    let mut z = (ring as u64).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// How a commit's counts are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Convention {
    /// Tokens accepted, the bonus token included.
    Accepted = 0,
    /// Drafts accepted: one token less.
    AcceptedDrafts = 1,
    /// Tokens rejected.
    Rejected = 2,
}

/// Accepted tokens of a row of `tokens`, clamped to `0..=tokens`, and whether the count had to be clamped.
#[inline(always)]
pub fn accepted(convention: Convention, count: i64, tokens: i64) -> (i64, bool) {
    if tokens == 0 {
        return (0, false);
    }
    let wanted = match convention {
        Convention::Accepted => count,
        Convention::AcceptedDrafts => count.saturating_add(1),
        Convention::Rejected => tokens.saturating_sub(count),
    };
    let taken = wanted.clamp(0, tokens);
    (taken, taken != wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(window: i64, keep: i64, max: i64, schedule: Schedule) -> Rule {
        Rule { window, keep, max_step_tokens: max, schedule }
    }

    #[test]
    fn staggered_rings_fold_evenly() {
        for window in 1..=64 {
            let rule = rule(window, 0, 1, Schedule::Staggered);
            // W rings, one token a step, from position 0: after the first window every step folds exactly one ring.
            let n = window as usize;
            let mut tags = vec![0i64; n];
            for position in 0..4 * window {
                let mut folded = 0;
                for (ring, tag) in tags.iter_mut().enumerate() {
                    let folds = rule.folds(StepView {
                        position,
                        tag: *tag,
                        tokens: 1,
                        flush_before: rule.flush_before(0, ring as i64),
                        flush: false,
                    });
                    folded += i64::from(folds > 0);
                    *tag += folds;
                }
                assert_eq!(folded, i64::from(position > 0), "window {window}, position {position}");
            }
        }
    }

    #[test]
    fn staggered_offsets_are_a_permutation() {
        for window in 1..=256 {
            let rule = rule(window, 0, 1, Schedule::Staggered);
            let mut seen = vec![false; window as usize];
            for ring in 0..window {
                seen[(rule.flush_before(1000, ring) - 1001) as usize] = true;
            }
            assert!(seen.iter().all(|&s| s), "window {window}");
        }
    }

    #[test]
    fn by_position_folds_at_the_same_tokens_whatever_is_accepted() {
        let rule = rule(16, 2, 4, Schedule::ByPosition);
        let points = |accepts: &[i64]| {
            let (mut position, mut tag, mut points) = (0, 0, vec![]);
            for &accept in accepts.iter().cycle().take(400) {
                let folds = rule.folds(StepView { position, tag, tokens: 4, flush_before: 0, flush: false });
                tag += folds;
                if folds > 0 {
                    points.push(tag);
                }
                assert!(position - tag + 4 <= rule.window + rule.keep);
                position += accept;
            }
            points.truncate(20);
            points
        };
        assert_eq!(points(&[4]), points(&[1, 3]));
        assert_eq!(points(&[4]), (1..=20).map(|i| i * rule.period()).collect::<Vec<_>>());
    }

    #[test]
    fn case_5_without_a_schedule_a_fold_happens_only_when_it_must() {
        for (max, tokens, accept, every) in [(4, 4, 4, 4), (4, 4, 1, 13), (8, 1, 1, 16)] {
            let rule = rule(16, 0, max, Schedule::None);
            let (mut position, mut tag, mut since, mut gaps) = (0i64, 0i64, 0, vec![]);
            for _ in 0..200 {
                let history = position - tag;
                let folds = rule.folds(StepView { position, tag, tokens, flush_before: 0, flush: false });
                assert!(folds == 0 || history + tokens > 16, "a fold before it must");
                assert!(history <= 16);
                if folds > 0 {
                    gaps.push(since);
                    since = 0;
                }
                tag += folds;
                assert!(position - tag + tokens <= 16);
                position += accept;
                since += 1;
            }
            assert!(gaps.iter().all(|&gap| gap == every), "{gaps:?}");
        }
    }

    #[test]
    fn case_7_the_three_conventions_agree() {
        assert_eq!(accepted(Convention::Accepted, 1, 4), (1, false));
        assert_eq!(accepted(Convention::AcceptedDrafts, 0, 4), (1, false));
        assert_eq!(accepted(Convention::Rejected, 3, 4), (1, false));
        assert_eq!(accepted(Convention::Accepted, 5, 4), (4, true));
        assert_eq!(accepted(Convention::Accepted, -1, 4), (0, true));
        assert_eq!(accepted(Convention::Rejected, i64::MIN, 4), (4, true));
        assert_eq!(accepted(Convention::AcceptedDrafts, i64::MAX, 4), (4, true));
        assert_eq!(accepted(Convention::AcceptedDrafts, 7, 0), (0, false));
    }
}
