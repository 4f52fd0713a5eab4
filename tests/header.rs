//! The committed header is what cbindgen makes of `src/ffi`, and its macros agree with the crate.

use std::path::Path;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The header as it should be: what cbindgen makes of `src/ffi`, with the types in the order of `types.rs`, one-line comments on
/// one line, and without Rust's "Safety" paragraphs, which speak to Rust callers.
fn generate() -> String {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("cbindgen.toml");
    let types_rs = root().join("src/ffi/types.rs");
    let bindings = cbindgen::Builder::new()
        .with_src(&types_rs)
        .with_src(root().join("src/ffi/calls.rs"))
        .with_config(config)
        .generate()
        .expect("src/ffi has a C interface");
    let mut bytes = Vec::new();
    bindings.write(&mut bytes);
    let text = String::from_utf8(bytes).expect("a header in UTF-8");

    // Items between the preamble and the functions, each with its comment.
    let (preamble, rest) = text.split_once("\n\n\n/*\n").expect("a first item");
    let (items, functions) = rest.split_once("#ifdef __cplusplus\nextern").expect("functions");
    let order = std::fs::read_to_string(types_rs).expect("types.rs");
    let place = |item: &str| {
        let name = item
            .lines()
            .find_map(|line| line.strip_prefix("#define ").or(line.strip_prefix("typedef ")))
            .map(|line| line.strip_prefix("struct ").or(line.strip_prefix("int32_t ")).unwrap_or(line))
            .map(|line| line.trim_start_matches("CUstream_st *"))
            .and_then(|line| line.split([' ', ';']).next())
            .unwrap_or_else(|| panic!("an item without a name: {item}"));
        [format!("type {name} "), format!("const {name}:"), format!("struct {name} "), format!("enum {name} ")]
            .iter()
            .filter_map(|declaration| order.find(&format!("pub {declaration}")))
            .next()
            .unwrap_or_else(|| panic!("{name} is not in types.rs"))
    };
    let mut items: Vec<String> =
        items.split("\n\n/*\n").map(|item| format!("/*\n{}\n", item.trim_end().trim_start_matches("/*\n"))).collect();
    items.sort_by_key(|item| place(item));
    let text = format!("{preamble}\n\n{}\n#ifdef __cplusplus\nextern{functions}", items.join("\n"));

    let mut out: Vec<String> = Vec::new();
    let mut comment: Vec<String> = Vec::new();
    let mut inside = false;
    let mut indent = "";
    for line in text.lines() {
        let body = line.trim();
        if body == "/*" {
            indent = &line[..line.len() - line.trim_start().len()];
            (inside, comment) = (true, Vec::new());
        } else if inside && body == "*/" {
            inside = false;
            let kept: Vec<&String> = comment
                .iter()
                .take_while(|l| l.as_str() != "# Safety")
                .filter(|l| !l.starts_with("cbindgen:"))
                .collect();
            let end = kept.iter().rposition(|l| !l.is_empty()).map_or(0, |i| i + 1);
            for (i, text) in kept[..end].iter().enumerate() {
                let (open, close) = (if i == 0 { "/*" } else { " *" }, if i + 1 == end { " */" } else { "" });
                let space = if text.is_empty() { "" } else { " " };
                out.push(format!("{indent}{open}{space}{text}{close}"));
            }
        } else if inside {
            comment.push(body.to_owned());
        } else {
            out.push(
                line.replace(" // __cplusplus", "").replace("  // __cplusplus", "").replace("  // extern \"C\"", ""),
            );
        }
    }
    // The constants of a type stand together under it.
    let mut lines: Vec<String> = Vec::new();
    for (i, line) in out.iter().enumerate() {
        let next_item = out[i + 1..].iter().find(|l| !l.starts_with("/*") && !l.starts_with(" *"));
        let constant = next_item.is_some_and(|l| l.starts_with("#define REPLAYSSM_"));
        let above =
            lines.last().is_some_and(|l| l.starts_with("#define REPLAYSSM_") || l.starts_with("typedef int32_t"));
        if !(line.is_empty() && constant && above) {
            lines.push(line.clone());
        }
    }
    let mut text = lines.join("\n");
    text.push('\n');
    text
}

#[test]
fn the_committed_header_is_current() {
    let path = root().join("include/replayssm.h");
    let wanted = generate();
    if std::env::var_os("REPLAYSSM_WRITE_HEADER").is_some() {
        std::fs::write(&path, &wanted).expect("include/ is writable");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let difference = wanted.lines().zip(found.lines()).enumerate().find(|(_, (a, b))| a != b);
    assert!(wanted == found, "run `make header`; first difference: {difference:?}");
}

#[test]
fn version_macros_are_the_crates() {
    let header = std::fs::read_to_string(root().join("include/replayssm.h")).expect("the header");
    for (name, value) in [
        ("MAJOR", env!("CARGO_PKG_VERSION_MAJOR")),
        ("MINOR", env!("CARGO_PKG_VERSION_MINOR")),
        ("PATCH", env!("CARGO_PKG_VERSION_PATCH")),
    ] {
        assert!(header.contains(&format!("#define REPLAYSSM_VERSION_{name} {value}\n")), "{name}");
    }
    let number = replayssm::ffi::replayssm_version();
    assert_eq!(number >> 12 & 0xFFF, env!("CARGO_PKG_VERSION_MINOR").parse::<u32>().unwrap());
}

#[test]
fn every_status_has_its_name() {
    let header = std::fs::read_to_string(root().join("include/replayssm.h")).expect("the header");
    let mut statuses = 0;
    for line in header.lines().filter(|l| l.starts_with("#define REPLAYSSM_")) {
        let mut words = line.split_whitespace().skip(1);
        let (Some(name), Some(value)) = (words.next(), words.next()) else { continue };
        let Ok(value) = value.parse::<i32>() else { continue };
        // SAFETY: the function returns a static string.
        let text = unsafe { std::ffi::CStr::from_ptr(replayssm::ffi::replayssm_status_string(value)) };
        if text.to_bytes() == name.as_bytes() {
            statuses += 1;
        }
    }
    assert_eq!(statuses, 10, "statuses in the header whose string is their own name");
}
