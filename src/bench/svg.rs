//! Drawings, legible on light and dark pages: bars of measured times and their floors, in units of the plain update's time; curves of errors.
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
    let note = "time of a layer's step over the plain update's (1); inner bar: the fewest bytes over the read stream";
    let _ = writeln!(body, r#"  <text x="{LEFT:.0}" y="{:.0}" class="small">{note}</text>"#, bottom + 32.0);
    let what = "A bar for each configuration: the time of a layer's step, and within it the floor, both over the plain update's time.";
    page(title, what, "", (LEFT + WIDTH + 200.0, bottom + 44.0), lines, &(axis + &body))
}

/// A line through points, on logarithmic axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Its colour and its dashes, classes of the style.
    pub class: String,
    /// From left to right. Those that are not positive are left out.
    pub points: Vec<(f64, f64)>,
}

/// Curves between the same axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// Above it.
    pub title: String,
    /// In the order in which they are drawn.
    pub curves: Vec<Curve>,
}

const CURVES: &str = r#"    .curve { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
    .fp32 { stroke: #cf222e; stroke-width: 3; }
    .full { stroke: #0969da; }
    .high { stroke: #8250df; stroke-width: 2.5; }
    .bf16 { stroke: #bc4c00; }
    .f16 { stroke: #1a7f37; }
    .dashes { stroke-dasharray: 6 3; }
    .dots { stroke-dasharray: 1.5 2; }
    .both { stroke-dasharray: 6 2 1.5 2; }
    @media (prefers-color-scheme: dark) {
      .fp32 { stroke: #f85149; }
      .full { stroke: #4493f8; }
      .high { stroke: #ab7df8; }
      .bf16 { stroke: #e0823d; }
      .f16 { stroke: #3fb950; }
    }
"#;

/// The decades that hold all positive values: at least one.
fn decades(values: impl Iterator<Item = f64>) -> (i32, i32) {
    let logs = values.filter(|&value| value > 0.0 && value.is_finite()).map(f64::log10);
    let (least, most) = logs.fold((f64::MAX, f64::MIN), |(least, most), log| (log.min(least), log.max(most)));
    if least > most {
        return (0, 1);
    }
    let least = least.floor() as i32;
    (least, (most.ceil() as i32).max(least + 1))
}

fn label(x: f64, y: f64, class: &str, text: &str) -> String {
    format!("  <text x=\"{x:.0}\" y=\"{y:.0}\" class=\"{class}\">{}</text>\n", escaped(text))
}

fn line([x1, y1, x2, y2]: [f64; 4], class: &str) -> String {
    format!("  <line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>\n")
}

/// A drawing of curves: rows of panels, each row with a name and a scale of its own, and columns of a legend, each a label and a class.
pub fn curves(title: &str, lines: &[String], rows: &[(&str, Vec<Panel>)], legend: &[Vec<(String, String)>]) -> String {
    const LEFT: f64 = 72.0;
    const WIDTH: f64 = 200.0;
    const HEIGHT: f64 = 220.0;
    const GAP: f64 = 34.0;
    let points = |panels: &[Panel]| -> Vec<(f64, f64)> {
        panels.iter().flat_map(|panel| &panel.curves).flat_map(|curve| curve.points.iter().copied()).collect()
    };
    let (from, to) = decades(rows.iter().flat_map(|(_, panels)| points(panels)).map(|point| point.0));
    let columns = rows.iter().map(|(_, panels)| panels.len()).max().unwrap_or(0).max(3);
    let (width, mut top, mut body) =
        (LEFT + (WIDTH + GAP) * columns as f64, 56.0 + 16.0 * lines.len() as f64, String::new());
    for (name, panels) in rows {
        top += 20.0;
        let (least, most) = decades(points(panels).into_iter().map(|point| point.1));
        let (bottom, middle) = (top + HEIGHT, top + HEIGHT / 2.0);
        let y = |value: f64| bottom - HEIGHT * (value.log10() - f64::from(least)) / f64::from(most - least);
        let _ = writeln!(
            body,
            r#"  <text x="20" y="{middle:.0}" class="group middle" transform="rotate(-90 20 {middle:.0})">{}</text>"#,
            escaped(name)
        );
        for decade in least..=most {
            body += &label(LEFT - 5.0, y(10f64.powi(decade)) + 4.0, "small end", &format!("1e{decade}"));
        }
        for (i, panel) in panels.iter().enumerate() {
            let left = LEFT + (WIDTH + GAP) * i as f64;
            let x = |value: f64| left + WIDTH * (value.log10() - f64::from(from)) / f64::from(to - from);
            body += &label(left, top - 6.0, "group", &panel.title);
            for at in (least..=most).map(|decade| y(10f64.powi(decade))) {
                body += &line([left, at, left + WIDTH, at], "line");
            }
            for decade in from..=to {
                let at = x(10f64.powi(decade));
                body += &line([at, top, at, bottom], "line");
                body += &label(at, bottom + 14.0, "small middle", &format!("1e{decade}"));
            }
            for curve in &panel.curves {
                let seen = curve.points.iter().filter(|(at, value)| *at > 0.0 && *value > 0.0 && value.is_finite());
                let list: Vec<_> = seen.map(|(at, value)| format!("{:.1},{:.1}", x(*at), y(*value))).collect();
                let _ = writeln!(body, r#"  <polyline points="{}" class="curve {}"/>"#, list.join(" "), curve.class);
            }
        }
        top = bottom + 24.0;
    }
    top += 12.0;
    for (i, names) in legend.iter().enumerate() {
        let left = LEFT + (width - LEFT) / legend.len() as f64 * i as f64;
        for (j, (name, class)) in names.iter().enumerate() {
            let at = top + 18.0 * j as f64;
            body += &line([left, at, left + 36.0, at], &format!("curve {class}"));
            body += &label(left + 44.0, at + 4.0, "small", name);
        }
    }
    let height = top + 18.0 * legend.iter().map(Vec::len).max().unwrap_or(0) as f64;
    let what = "Curves of errors over tokens, both axes logarithmic: a panel for each sequence, a curve for each way to keep a state.";
    page(title, what, CURVES, (width, height), lines, &body)
}

/// A whole drawing.
fn page(title: &str, what: &str, style: &str, (width, height): (f64, f64), lines: &[String], body: &str) -> String {
    let mut heads = String::new();
    for (i, line) in lines.iter().enumerate() {
        let _ = writeln!(heads, r#"  <text x="16" y="{}" class="small">{}</text>"#, 46 + 16 * i, escaped(line));
    }
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{height:.0}" viewBox="0 0 {width:.0} {height:.0}" role="img" aria-labelledby="title desc">
  <title id="title">{title}</title>
  <desc id="desc">{what}</desc>
  <style>
{STYLE}{style}  </style>
  <rect width="100%" height="100%" class="page"/>
  <text x="16" y="26" class="title">{title}</text>
{heads}{body}</svg>
"#,
        title = escaped(title),
    )
}
