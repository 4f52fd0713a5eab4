//! The functions that the header declares, for tests that compare or document them.
// SPDX-License-Identifier: MIT OR Apache-2.0

// Every test binary that includes this file uses a part of it.
#![allow(dead_code)]

/// A declaration of the header: the function's name, what it returns, its parameters, and its comment.
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) returns: String,
    pub(crate) parameters: Vec<String>,
    pub(crate) comment: String,
}

/// The functions that a header declares.
pub(crate) fn functions(header: &str) -> Vec<Function> {
    let mut list = Vec::new();
    let mut comment = String::new();
    let mut lines = header.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("/*") {
            comment = line.to_owned();
            while !comment.ends_with("*/") {
                let more = lines.next().expect("the end of a comment");
                comment = format!("{comment}\n{}", more.trim_start_matches(" *").trim_start());
            }
        } else if line.starts_with("REPLAYSSM_API") || line.starts_with("REPLAYSSM_CALL") {
            let mut code = line.to_owned();
            while !code.ends_with(';') {
                code = format!("{code} {}", lines.next().expect("the end of a declaration").trim());
            }
            let (head, parameters) = code.split_once('(').expect("a function");
            let (returns, name) = head.rsplit_once([' ', '*']).expect("a name");
            let parameters = parameters.trim_end_matches(");").split(',').map(|p| p.trim().to_owned());
            list.push(Function {
                name: name.to_owned(),
                returns: head[..head.len() - name.len()].split_once(' ').map_or(returns, |(_, r)| r).trim().to_owned(),
                parameters: parameters.filter(|p| p != "void").collect(),
                comment: std::mem::take(&mut comment),
            });
        } else if line.is_empty() {
            comment.clear();
        }
    }
    list
}
