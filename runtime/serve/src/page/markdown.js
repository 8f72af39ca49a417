/* Markdown as elements. The answer's text only ever becomes text nodes, never HTML, and nothing in it is loaded: an image is shown as
   a link. Work grows with the length only: marks close within 500 characters, and blocks nest 6 levels deep. */
const DEEPEST = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const COLUMNS = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const INLINE = new RegExp([
  "\\\\([!-/:-@\\[-`{-~])",
  "(`{1,9})([^]{0,500}?[^`])\\2(?!`)",
  "\\*\\*(?=\\S)([^]{0,500}?\\S)\\*\\*",
  "(?<!\\w)__(?=\\S)([^]{0,500}?\\S)__(?!\\w)",
  "\\*(?=[^\\s*])([^*]{0,500}?[^\\s*])\\*",
  "(?<!\\w)_(?=[^\\s_])([^_]{0,500}?[^\\s_])_(?!\\w)",
  "~~(?=\\S)([^]{0,500}?\\S)~~",
  "!?\\[([^\\[\\]]{0,500})\\]\\(([^\\s()]{0,2000})(?: +\"[^\"]{0,500}\")?\\)",
  "(https?://[^\\s<>()\"'`]{1,2000}[^\\s<>()\"'`.,:;!?*_])",
].join("|"), "g");

function element(tag, children = [], properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const markdown = text => blocks(text.replaceAll("\t", "    ").split(/\r?\n/), 0);

/* Each parser takes the lines and where its block starts, and returns the block and where the next one starts. */
function blocks(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [block, next] = parser(lines, at, depth)(lines, at, depth);
    made.push(block);
    at = next;
  }
  return made;
}

function parser(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return code;
  if (HEADING.test(line)) return heading;
  if (RULE.test(line)) return (_, at) => [element("hr"), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote;
  if (depth < DEEPEST && ITEM.test(line)) return list;
  if (line.includes("|") && isColumns(lines[at + 1] ?? "")) return table;
  return paragraph;
}

const isColumns = line => line.length < 1000 && COLUMNS.test(line);

/* The first line from `at` on of which `ends` holds, or the end. */
function until(lines, at, ends) {
  while (at < lines.length && !ends(lines[at], at)) at += 1;
  return at;
}

function code(lines, at) {
  const [, fence, language] = lines[at].match(FENCE);
  const end = until(lines, at + 1, line => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], ""));
  const text = lines.slice(at + 1, end).join("\n");
  const bar = element("div", [element("span", [language]), copyButton(() => text)], { className: "bar" });
  return [element("div", [bar, element("pre", [element("code", [text])])], { className: "code" }), end + 1];
}

function heading(lines, at) {
  const [, marks, text] = lines[at].match(HEADING);
  return [element("h" + Math.min(marks.length + 1, 6), inline(text.trim().replace(/ #+$/, ""))), at + 1];
}

function quote(lines, at, depth) {
  const end = until(lines, at, line => !QUOTE.test(line));
  return [element("blockquote", blocks(lines.slice(at, end).map(line => line.replace(QUOTE, "")), depth + 1)), end];
}

function list(lines, at, depth) {
  const [, { length: indent }, mark] = lines[at].match(ITEM);
  const isOrdered = /\d/.test(mark), items = [];
  const begins = line => {
    const item = line.match(ITEM);
    return item && !RULE.test(line) && item[1].length < indent + 2 && /\d/.test(item[2]) === isOrdered;
  };
  const belongs = (line, i) => line.trim() ? line.search(/\S/) >= indent + 2 || (lines[i - 1].trim() && parser(lines, i, 0) === paragraph)
    : lines[i + 1]?.trim() && (begins(lines[i + 1]) || lines[i + 1].search(/\S/) >= indent + 2);
  while (at < lines.length && begins(lines[at])) {
    const [, before, mark, text = ""] = lines[at].match(ITEM);
    const width = before.length + mark.length + 1;
    const end = until(lines, at + 1, (line, i) => begins(line) || !belongs(line, i));
    const rest = lines.slice(at + 1, end).map(line => line.slice(Math.min(width, Math.max(line.search(/\S/), 0))));
    items.push(element("li", blocks([text, ...rest], depth + 1)));
    at = end;
  }
  return [isOrdered ? element("ol", items, { start: parseInt(mark) }) : element("ul", items), at];
}

function table(lines, at) {
  const cells = line => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim());
  const sides = cells(lines[at + 1]).map(cell => cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "");
  const row = (line, tag) => element("tr", cells(line).slice(0, sides.length).map((cell, i) => {
    const made = element(tag, inline(cell));
    made.style.textAlign = sides[i];
    return made;
  }));
  const end = until(lines, at + 2, line => !line.includes("|"));
  const body = lines.slice(at + 2, end).map(line => row(line, "td"));
  const parts = [element("thead", [row(lines[at], "th")]), element("tbody", body)];
  return [element("div", [element("table", parts)], { className: "scroll" }), end];
}

function paragraph(lines, at, depth) {
  const end = until(lines, at + 1, (line, i) => !line.trim() || parser(lines, i, depth) !== paragraph);
  return [element("p", inline(lines.slice(at, end).join("\n").trim())), end];
}

function inline(text) {
  const made = [];
  let done = 0;
  for (const found of text.matchAll(INLINE)) {
    made.push(text.slice(done, found.index), mark(found));
    done = found.index + found[0].length;
  }
  return [...made, text.slice(done)].filter(part => part !== "");
}

function mark([all, escaped, , verbatim, bold, boldToo, italic, italicToo, struck, label, target, address]) {
  if (escaped) return escaped;
  if (verbatim) return element("code", [verbatim.replace(/^ (.*\S.*) $/s, "$1")]);
  if (bold || boldToo) return element("strong", inline(bold || boldToo));
  if (italic || italicToo) return element("em", inline(italic || italicToo));
  if (struck) return element("s", inline(struck));
  if (address) return link([address], address) || all;
  return link(label ? inline(label) : [target], target) || all;
}

/* A link that opens a page of the web when it is clicked, or nothing if the target is something else. */
function link(children, target) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return null;
  return element("a", children, { href: target, title: target, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function copyButton(text) {
  const button = element("button", ["Copy"], { type: "button", className: "small" });
  button.onclick = async () => {
    button.textContent = await copy(text()) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  return button;
}

/* Browsers allow the clipboard to pages of this machine and of https only; else the old way is tried. */
async function copy(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* the old way */ }
  const area = element("textarea", [], { value: text });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
