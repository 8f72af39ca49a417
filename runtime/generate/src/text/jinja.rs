//! Jinja as `transformers` configures it, with limits for untrusted templates: on the length of the source, of expressions and of
//! the output, on the number of steps, and on every field width. `untrusted` limits the rest: time and memory.

use super::python_json;
use minijinja::filters;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State};
use std::io::{self, Write};

/// Longest source in bytes; real ones have up to some 30 kB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Most tags; real templates have some hundreds.
const MAX_TAGS: usize = 20_000;
/// Longest tag in bytes, not counting string literals. The length bounds how deep its expression nests, and so the parser's stack.
const MAX_TAG_BYTES: usize = 16 << 10;
/// Longest output in bytes.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Widest field or indentation in characters.
const MAX_WIDTH: usize = 10_000;
/// Steps that any template may take.
const BASE_FUEL: u64 = 1_000_000;
/// More steps for each message; a real template takes some hundred.
const FUEL_PER_MESSAGE: u64 = 1_000;
/// Most steps in all. Values nest at most as deep as there are steps, and dropping nested values takes stack.
const MAX_FUEL: u64 = 2_000_000;

/// Parses a template, and drops the result.
pub(super) fn check(source: &str) -> Result<(), Error> {
    refuse_oversized(source)?;
    environment(0).template_from_str(&without_generation_tags(source)).map(drop)
}

/// Renders a template with these values. The number of `messages` among them sets the step limit.
pub(super) fn render(source: &str, values: Value, messages: usize) -> Result<String, Error> {
    let fuel = FUEL_PER_MESSAGE.saturating_mul(messages as u64).saturating_add(BASE_FUEL).min(MAX_FUEL);
    let source = without_generation_tags(source);
    let environment = environment(fuel);
    let mut out = LimitedOutput(Vec::new());
    environment.template_from_named_str("chat", &source)?.render_captured_to(values, &mut out)?;
    String::from_utf8(out.0).map_err(|e| refused(e.to_string()))
}

fn refused(why: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// Output that refuses to grow beyond [`MAX_OUTPUT_BYTES`].
struct LimitedOutput(Vec<u8>);

impl Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::other(format!("its output is longer than {} MiB", MAX_OUTPUT_BYTES >> 20)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Refuses a source for which the recursive parser would need too much stack.
fn refuse_oversized(source: &str) -> Result<(), Error> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(refused(format!("it has {} bytes, and at most {MAX_SOURCE_BYTES} are read", source.len())));
    }
    let (mut rest, mut tags) = (source, 0);
    while let Some(open) = rest.find('{') {
        rest = &rest[open + 1..];
        // The brace may be ordinary text, followed by a character of several bytes.
        let Some(inside) = rest.strip_prefix(['#', '{', '%']) else { continue };
        let (bytes, code) = match rest.as_bytes()[0] {
            b'#' => (inside.find("#}").unwrap_or(inside.len()), 0),
            b'{' => tag_length(inside, b'}'),
            b'%' if is_tag(inside, "raw") => (raw_block_length(inside), 0),
            _ => tag_length(inside, b'%'),
        };
        tags += 1;
        if code > MAX_TAG_BYTES {
            return Err(refused(format!("one of its tags has {code} bytes, and at most {MAX_TAG_BYTES} are read")));
        }
        if tags > MAX_TAGS {
            return Err(refused(format!("it has more than {MAX_TAGS} tags")));
        }
        rest = &inside[bytes..];
    }
    Ok(())
}

/// Length of a tag that ends with `close` and a brace, and its length without string literals.
fn tag_length(text: &str, close: u8) -> (usize, usize) {
    let (mut quote, mut escaped, mut open, mut code) = (None, false, 0usize, 0);
    let bytes = text.as_bytes();
    for (at, byte) in bytes.iter().copied().enumerate() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if byte == b'\\' => escaped = true,
            Some(mark) if byte == mark => quote = None,
            Some(_) => {}
            None => {
                code += 1;
                match byte {
                    _ if open == 0 && byte == close && bytes.get(at + 1) == Some(&b'}') => return (at, code),
                    b'"' | b'\'' => quote = Some(byte),
                    b'(' | b'[' | b'{' => open += 1,
                    b')' | b']' | b'}' => open = open.saturating_sub(1),
                    _ => {}
                }
            }
        }
    }
    (bytes.len(), code)
}

/// Whether `inside`, the text after `{%`, is a tag that consists of this word.
fn is_tag(inside: &str, word: &str) -> bool {
    let sign = |text: &'_ str| text.strip_prefix(['-', '+']).map_or(text.len(), str::len);
    let text = inside[inside.len() - sign(inside)..].trim_ascii_start();
    let Some(text) = text.strip_prefix(word).map(str::trim_ascii_start) else { return false };
    text[text.len() - sign(text)..].starts_with("%}")
}

/// Length of a raw block, in which nothing is a tag or a string literal.
fn raw_block_length(text: &str) -> usize {
    let ends = text.match_indices("{%").map(|(at, open)| at + open.len());
    ends.into_iter().find(|at| is_tag(&text[*at..], "endraw")).unwrap_or(text.len())
}

/// Jinja as `transformers` configures it, limited to `fuel` steps.
fn environment(fuel: u64) -> Environment<'static> {
    let mut env = Environment::new();
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_fuel(Some(fuel));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(method);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env.add_filter("tojson", tojson);
    env.add_filter("format", format);
    env.add_filter("indent", indent);
    env
}

/// Python's methods of strings, lists and dictionaries, with a limit on the widths of `str.format`.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let ("format", Some(text)) = (name, value.as_str()) {
        text.split('{').skip(1).filter_map(|field| field.split('}').next()).try_for_each(refuse_wide_digits)?;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

fn format(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    if let [text, values @ ..] = &args[..] {
        let text = text.as_str().unwrap_or_default();
        let key = |field: &'_ str| field.strip_prefix('(').and_then(|f| f.find(')')).map_or(0, |end| end + 2);
        let fields = text.split('%').skip(1).map(|field| &field[key(field)..]);
        fields.filter_map(|field| field.split(|c: char| c.is_alphabetic()).next()).try_for_each(refuse_wide_digits)?;
        if text.contains('*') {
            values.iter().filter_map(Value::as_usize).try_for_each(refuse_wide)?;
        }
    }
    Value::from_function(filters::format).call(state, &args)
}

fn indent(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    for arg in args.iter().skip(1) {
        let named = arg.is_kwargs().then(|| arg.get_attr("width")).transpose()?;
        named.as_ref().unwrap_or(arg).as_usize().map_or(Ok(()), refuse_wide)?;
    }
    Value::from_function(filters::indent).call(state, &args)
}

/// Refuses a format field with a width or precision above [`MAX_WIDTH`].
fn refuse_wide_digits(field: &str) -> Result<(), Error> {
    let numbers = field.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    // Digits that do not fit an integer exceed the limit anyway.
    numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).try_for_each(refuse_wide)
}

fn refuse_wide(width: usize) -> Result<(), Error> {
    if width > MAX_WIDTH { Err(refused(format!("a width of {width} is more than {MAX_WIDTH}"))) } else { Ok(()) }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
}

fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(width) => Some(width),
        None => options.get("indent")?,
    };
    // Other arguments of `json.dumps`. Templates set them to the values that `python_json` uses anyway.
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(known)?;
    }
    options.assert_all_used()?;
    refuse_wide(indent.unwrap_or(0))?;
    python_json::dumps(value, indent)
        .map(Value::from_safe_string)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}")))
}

/// `{% generation %}` marks text to train on. In a prompt its body is ordinary text, so the tag becomes `{% if true %}`.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(length) = rest[open..].find("%}") else { break };
        let (tag, close) = (&rest[open..open + length + 2], open + length + 2);
        let word = tag[2..length].trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        out.push_str(&rest[..open]);
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[close..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_expressions_are_found_behind_raw_blocks_comments_and_quotes() {
        let long = "not ".repeat(5_000);
        let text = "x".repeat(20_000);
        for (around, refused) in [
            ("{{ LONG true }}", true),
            ("{%- if LONG true %}{% endif %}", true),
            ("{% raw %}{{ \" {% endraw %}{{ LONG true }}{# \" #}", true),
            ("{%- raw -%} endraw {{ ' {%- endraw +%}{{ LONG true }}{# ' #}", true),
            ("{#}{{ \" #}{{ LONG true }}", true),
            ("{{ {1: {2: 3}} and LONG true }}", true),
            ("{{ '}}' and LONG true }}", true),
            ("{é}{{ LONG true }}", true),
            ("{{ 'TEXT' }}", false),
            ("{{ 'it\\'s TEXT' }}", false),
            ("{% raw %}TEXT{{ LONG true }}{% endraw %}", false),
            ("{# LONG #}TEXT{{ 1 }}", false),
        ] {
            let source = around.replace("LONG", &long).replace("TEXT", &text);
            assert_eq!(refuse_oversized(&source).is_err(), refused, "{around}");
        }
    }
}
