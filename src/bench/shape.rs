//! Shapes of recurrent layers, and of models that have them.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::fmt;
use std::str::FromStr;

/// A family of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Mamba-2.
    Mamba2,
    /// Gated DeltaNet.
    Gdn,
    /// Kimi Delta Attention.
    Kda,
}

impl Family {
    /// As an option names it.
    pub fn name(self) -> &'static str {
        match self {
            Family::Mamba2 => "mamba2",
            Family::Gdn => "gdn",
            Family::Kda => "kda",
        }
    }
}

impl FromStr for Family {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Family::Mamba2, Family::Gdn, Family::Kda]
            .into_iter()
            .find(|family| family.name() == text)
            .ok_or_else(|| "expected mamba2, gdn or kda".to_owned())
    }
}

/// What one layer of a sequence is: heads of a matrix each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Which recurrence.
    pub family: Family,
    /// Heads of the state (delta rules: HV).
    pub heads: usize,
    /// Rows of a head's state (Mamba-2: headdim, delta rules: V).
    pub rows: usize,
    /// Columns of a head's state (Mamba-2: dstate, delta rules: K).
    pub columns: usize,
    /// Groups that share B and C (delta rules: query and key heads, H).
    pub groups: usize,
}

impl Shape {
    const fn mamba2(heads: usize, rows: usize, columns: usize, groups: usize) -> Self {
        Shape { family: Family::Mamba2, heads, rows, columns, groups }
    }

    const fn gdn(groups: usize, heads: usize, columns: usize, rows: usize) -> Self {
        Shape { family: Family::Gdn, heads, rows, columns, groups }
    }

    const fn kda(heads: usize, columns: usize, rows: usize) -> Self {
        Shape { family: Family::Kda, heads, rows, columns, groups: heads }
    }

    /// From the numbers of an option: Mamba-2 H,D,N,G; GDN H,HV,K,V; KDA H,K,V.
    pub fn parse(family: Family, numbers: &[usize]) -> Result<Self, String> {
        let shape = match (family, numbers) {
            (Family::Mamba2, &[heads, rows, columns, groups]) => Self::mamba2(heads, rows, columns, groups),
            (Family::Gdn, &[groups, heads, columns, rows]) => Self::gdn(groups, heads, columns, rows),
            (Family::Kda, &[heads, columns, rows]) => Self::kda(heads, columns, rows),
            (Family::Mamba2, _) => {
                return Err("expected heads,headdim,dstate,groups for mamba2, as 128,64,128,8".into());
            }
            (Family::Gdn, _) => return Err("expected H,HV,K,V for gdn, as 16,64,128,128".into()),
            (Family::Kda, _) => return Err("expected H,K,V for kda, as 32,128,128".into()),
        };
        let fits = |n: usize| (1..=256).contains(&n);
        let heads_fit = shape.groups > 0 && shape.heads > 0 && shape.heads.is_multiple_of(shape.groups);
        if !fits(shape.rows) || !fits(shape.columns) {
            return Err("expected rows and columns of a state from 1 to 256".into());
        }
        if !heads_fit {
            return Err("expected a number of heads that the groups (query and key heads) divide".into());
        }
        Ok(shape)
    }

    /// Whether it is one of the delta rules.
    pub fn is_delta(&self) -> bool {
        self.family != Family::Mamba2
    }

    /// Elements of a sequence's state.
    pub fn state(&self) -> usize {
        self.heads * self.rows * self.columns
    }

    /// Log decays of a token (Mamba-2: dt's).
    pub fn gates(&self) -> usize {
        if self.family == Family::Kda { self.heads * self.columns } else { self.heads }
    }

    /// Elements of a token's x (v), B (k) and C (q) together.
    pub fn packed(&self) -> usize {
        self.heads * self.rows + 2 * self.groups * self.columns
    }

    /// The same heads, but few of them.
    pub fn few(&self) -> Self {
        let heads = self.heads.min(if self.is_delta() { 2 } else { 4 });
        let groups = match self.family {
            Family::Kda => heads,
            _ if self.groups == 1 || self.heads > self.groups * 2 && self.is_delta() => 1,
            _ => heads.min(2),
        };
        let groups = if heads.is_multiple_of(groups) { groups } else { 1 };
        Shape { heads, groups, ..*self }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { heads, rows, columns, groups, .. } = self;
        match self.family {
            Family::Mamba2 => write!(f, "Mamba-2 {heads}x{rows}x{columns} g{groups}"),
            Family::Gdn => write!(f, "GDN {groups}/{heads}x{columns}x{rows}"),
            Family::Kda => write!(f, "KDA {heads}x{columns}x{rows}"),
        }
    }
}

/// A model, as far as its recurrent layers are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// As an option names it.
    pub name: &'static str,
    /// Of each recurrent layer.
    pub shape: Shape,
    /// Recurrent layers, where its configuration is public.
    pub layers: Option<usize>,
}

const fn model(name: &'static str, shape: Shape, layers: Option<usize>) -> Model {
    Model { name, shape, layers }
}

/// Models whose shapes have a name. Layers are those of the public model configurations.
pub const MODELS: [Model; 7] = [
    model("nemotron-3-nano-4b", Shape::mamba2(96, 80, 128, 8), Some(21)),
    model("nemotron-3-super-120b", Shape::mamba2(128, 64, 128, 8), Some(40)),
    model("nemotron-ultra-550b", Shape::mamba2(256, 64, 128, 8), Some(48)),
    model("one-group-hybrid", Shape::mamba2(80, 64, 128, 1), None),
    model("qwen3.5-4b", Shape::gdn(16, 32, 128, 128), Some(24)),
    model("qwen3.5-122b-a10b", Shape::gdn(16, 64, 128, 128), Some(36)),
    model("kimi-linear", Shape::kda(32, 128, 128), Some(20)),
];

/// What is timed if nothing is asked for: a shape of each family.
pub const USUAL: [Shape; 3] = [Shape::mamba2(128, 64, 128, 8), Shape::gdn(16, 64, 128, 128), Shape::kda(32, 128, 128)];

/// The same families in a size for tests.
pub const TINY: [Shape; 3] = [Shape::mamba2(4, 32, 64, 2), Shape::gdn(2, 4, 64, 32), Shape::kda(2, 64, 32)];

impl FromStr for Model {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<_> = MODELS.iter().map(|model| model.name).collect();
        let found = MODELS.into_iter().find(|model| model.name.eq_ignore_ascii_case(text));
        found.ok_or_else(|| format!("expected one of {}", names.join(", ")))
    }
}
