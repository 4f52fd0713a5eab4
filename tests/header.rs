//! The committed header is what cbindgen makes of `src/ffi`, and its macros agree with the crate.

#[path = "c/prototypes.rs"]
mod prototypes;

use std::path::Path;

use prototypes::{Function, functions};

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
            .map(|line| line.trim_start_matches("CUstream_st *").trim_start_matches("void (*"))
            .and_then(|line| line.split([' ', ';', ')']).next())
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
    let named = header.lines().filter(|l| l.starts_with("#define REPLAYSSM_ERROR_")).count();
    assert_eq!(statuses, named + 1, "statuses in the header whose string is their own name, OK among them");
}

/// What a function's comment lacks: it says what the function does, names every parameter, and has the parts that the header's
/// preamble promises.
fn missing(function: &Function) -> Vec<String> {
    let Function { returns, parameters, comment, .. } = function;
    let text = comment.trim_start_matches("/*").trim();
    let words: Vec<&str> = text.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    let is_handle = |p: &str| p.contains("**");
    let mut labels = vec!["Threads:", "Capture:"];
    if returns == "replayssm_status" {
        labels.push("Errors:");
    }
    if parameters.iter().any(|p| p.contains('*')) {
        labels.push("NULL:");
    }
    let creates = parameters.iter().any(|p| is_handle(p));
    let destroys = returns == "void" && !parameters.is_empty();
    if returns.contains('*') || creates || destroys {
        labels.push("Owner:");
    }
    let mut missing: Vec<String> = Vec::new();
    if ["NULL:", "Owner:", "Errors:", "Threads:", "Capture:"].iter().any(|label| text.starts_with(label))
        || text.len() < 20
    {
        missing.push("what it does".into());
    }
    for label in labels {
        let part = text.split_once(label).map(|(_, rest)| rest.trim_start());
        if part.is_none_or(|part| part.split_whitespace().next().is_none_or(|word| word.ends_with(':') || word == "*/"))
        {
            missing.push(label.into());
        }
    }
    for parameter in parameters {
        let name = parameter.rsplit([' ', '*']).next().unwrap_or_default();
        if !words.contains(&name) {
            missing.push(format!("the parameter {name}"));
        }
    }
    missing
}

#[test]
fn every_function_is_documented_in_all_its_parts() {
    let header = std::fs::read_to_string(root().join("include/replayssm.h")).expect("the header");
    let symbols = std::fs::read_to_string(root().join("tests/c/symbols.txt")).expect("symbols.txt");
    let functions = functions(&header);
    let mut names: Vec<&str> = functions.iter().map(|f| f.name.as_str()).collect();
    names.sort_unstable();
    let exported: Vec<&str> = symbols.lines().filter(|l| !l.starts_with('#')).collect();
    assert_eq!(names, exported, "functions of the header against the symbols of the library");
    let gaps: Vec<_> = functions.iter().map(|f| (&f.name, missing(f))).filter(|(_, gaps)| !gaps.is_empty()).collect();
    assert!(gaps.is_empty(), "{gaps:#?}");
}

#[test]
fn a_comment_without_one_of_its_parts_is_noticed() {
    const GOOD: &str = "/* Makes a thing of a context as desc says.
 *
 * NULL: neither context nor desc nor out.
 * Owner: the caller, of *out.
 * Errors: INVALID_ARGUMENT.
 * Threads: any. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_make(const struct replayssm_context *context,
                                const struct replayssm_desc *desc,
                                struct replayssm_thing **out);
";
    let gaps = |header: &str| {
        let list = functions(header);
        let [function] = &list[..] else { panic!("{} functions", list.len()) };
        assert_eq!((function.name.as_str(), function.returns.as_str()), ("replayssm_make", "replayssm_status"));
        missing(function)
    };
    assert_eq!(gaps(GOOD), Vec::<String>::new());
    let spoilt = [
        ("Makes a thing of a context as desc says.\n *", "", vec!["what it does"]),
        ("NULL: neither context nor desc nor out.", "context, desc, out", vec!["NULL:"]),
        ("Owner: the caller, of *out.", "", vec!["Owner:"]),
        ("Errors: INVALID_ARGUMENT.", "", vec!["Errors:"]),
        ("Errors: INVALID_ARGUMENT.", "Errors:", vec!["Errors:"]),
        ("Threads: any.", "", vec!["Threads:"]),
        ("Capture: never.", "Capture:", vec!["Capture:"]),
        ("desc", "descriptor", vec!["the parameter desc"]),
        (GOOD.split("REPLAYSSM_CALL").next().unwrap(), "", vec!["what it does", "Threads:", "Capture:", "Errors:"]),
    ];
    for (part, instead, wanted) in spoilt {
        let (comment, code) = GOOD.split_once("REPLAYSSM_CALL").unwrap();
        let comment = comment.replace(part, instead);
        let found = gaps(&format!("{comment}REPLAYSSM_CALL{code}"));
        assert!(wanted.iter().all(|w| found.iter().any(|f| f == w)), "without {part:?}: {found:?}");
    }
    // A function that returns a text, and one that destroys.
    let list = functions(
        "/* What it says. Threads: any. Capture: any. */\nREPLAYSSM_API const char *replayssm_text(int32_t n);\n\n\
         REPLAYSSM_API void replayssm_gone(struct replayssm_thing *thing);\n",
    );
    assert_eq!(
        (list[0].returns.as_str(), missing(&list[0])),
        ("const char *", vec!["Owner:".into(), "the parameter n".into()])
    );
    let wanted = ["what it does", "Threads:", "Capture:", "NULL:", "Owner:", "the parameter thing"];
    assert_eq!(missing(&list[1]), wanted);
}
