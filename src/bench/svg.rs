//! Bars as a drawing: measured times and their floors, in units of the plain update's time. Legible on light and dark pages.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::fmt::Write as _;

/// A bar.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Bars of one group stand together below its name.
    pub group: String,
    /// In front of the bar.
    pub label: String,
    /// Microseconds that were measured.
    pub us: f64,
    /// The fewest that the bytes take.
    pub floor_us: f64,
    /// Of the plain update.
    pub plain_us: f64,
}

const STYLE: &str = r#"    text { font-family: system-ui, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328; }
    .page { fill: #ffffff; }
    .title { font-size: 15px; font-weight: 600; }
    .group { font-weight: 600; }
    .small { font-size: 11px; fill: #59636e; }
    .end { text-anchor: end; }
    .middle { text-anchor: middle; }
    .measured { fill: #ddf4ff; stroke: #0969da; }
    .floor { fill: #0969da; }
    .line { stroke: #d1d9e0; }
    .plain { stroke: #cf222e; stroke-dasharray: 4 3; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .page { fill: #0d1117; }
      .small { fill: #9198a1; }
      .measured { fill: #0c2d4d; stroke: #4493f8; }
      .floor { fill: #4493f8; }
      .line { stroke: #3d444d; }
      .plain { stroke: #f85149; }
    }
"#;

/// Text as XML has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A drawing of bars, with a title and lines below it.
pub fn drawing(title: &str, lines: &[String], bars: &[Bar]) -> String {
    const LEFT: f64 = 230.0;
    const WIDTH: f64 = 460.0;
    const HEIGHT: f64 = 20.0;
    /// Bars end here, in plain updates, and longer ones with their number alone.
    const MOST: f64 = 1.5;
    let longest = bars.iter().map(|bar| bar.us / bar.plain_us).fold(1.0, f64::max).min(MOST);
    let x = |share: f64| LEFT + WIDTH * (share.min(longest) / longest);
    let mut body = String::new();
    let mut y = 62.0 + 16.0 * lines.len() as f64;
    let top = y - 8.0;
    let mut group = "";
    let mut draw = |text: String| {
        body.push_str("  ");
        body.push_str(&text);
        body.push('\n');
    };
    for bar in bars {
        if bar.group != group {
            y += HEIGHT;
            draw(format!(r#"<text x="16" y="{y:.0}" class="group">{}</text>"#, escaped(&bar.group)));
            y += 8.0;
            group = &bar.group;
        }
        y += HEIGHT;
        let (measured, floor) = (bar.us / bar.plain_us, bar.floor_us / bar.plain_us);
        let base = y - 13.0;
        draw(format!(r#"<text x="{:.0}" y="{y:.0}" class="end">{}</text>"#, LEFT - 8.0, escaped(&bar.label)));
        draw(format!(
            r#"<rect x="{LEFT:.0}" y="{base:.0}" width="{:.1}" height="14" class="measured"/>"#,
            x(measured) - LEFT
        ));
        draw(format!(
            r#"<rect x="{LEFT:.0}" y="{:.0}" width="{:.1}" height="6" class="floor"/>"#,
            base + 4.0,
            x(floor) - LEFT
        ));
        draw(format!(
            r#"<text x="{:.0}" y="{y:.0}" class="small">{} us, floor {}, plain {}</text>"#,
            LEFT + WIDTH + 10.0,
            super::table::us(bar.us),
            super::table::us(bar.floor_us),
            super::table::us(bar.plain_us)
        ));
    }
    let bottom = y + 10.0;
    let mut axis = String::new();
    let ticks = (longest / 0.25).floor() as usize;
    for tick in 0..=ticks {
        let share = 0.25 * tick as f64;
        let class = if tick == 4 { "plain" } else { "line" };
        let at = x(share);
        let _ = writeln!(axis, r#"  <line x1="{at:.1}" y1="{top:.0}" x2="{at:.1}" y2="{bottom:.0}" class="{class}"/>"#);
        let _ = writeln!(axis, r#"  <text x="{at:.1}" y="{:.0}" class="small middle">{share}</text>"#, bottom + 14.0);
    }
    let (width, height) = (LEFT + WIDTH + 200.0, bottom + 44.0);
    let mut heads = String::new();
    for (i, line) in lines.iter().enumerate() {
        let _ = writeln!(heads, r#"  <text x="16" y="{}" class="small">{}</text>"#, 46 + 16 * i, escaped(line));
    }
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{height:.0}" viewBox="0 0 {width:.0} {height:.0}" role="img" aria-labelledby="title desc">
  <title id="title">{title}</title>
  <desc id="desc">A bar for each configuration: the time of a layer's step, and within it the floor, both over the plain update's time.</desc>
  <style>
{STYLE}  </style>
  <rect width="100%" height="100%" class="page"/>
  <text x="16" y="26" class="title">{title}</text>
{heads}{axis}{body}  <text x="{LEFT:.0}" y="{:.0}" class="small">time of a layer's step over the plain update's (1); inner bar: the fewest bytes over the read stream</text>
</svg>
"#,
        bottom + 32.0,
        title = escaped(title),
    )
}
