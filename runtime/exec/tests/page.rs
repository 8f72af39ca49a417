//! The page of `hpp-exec serve` in a browser: answers as Markdown, none of which runs; editing, regenerating, stopping.

#![cfg(unix)]

mod support;

use serde_json::{Value, json};
use support::browser::{Page, chromium};
use support::server::{MODEL, Server, chat_plan};

/// Answers that try to run something or to load something.
const HOSTILE: [&str; 10] = [
    "<img src=x onerror=\"window.hacked = 1\">",
    "<script>window.hacked = 2</script>",
    "[click](javascript:window.hacked=3) [two](JaVaScRiPt:window.hacked=4) <a href=\"javascript:hacked=5\">x</a>",
    "![pixel](https://example.invalid/pixel.png) ![x](javascript:hacked=6)",
    "```html\n</code></pre><img src=x onerror=hacked=7>\n```",
    "```\"><img/src=x/onerror=hacked=8>\ntext\n```",
    "| <svg onload=hacked=9> | b |\n|---|---|\n| `<iframe srcdoc=\"<script>parent.hacked=10</script>\">` | <b>x</b> |",
    "# <style>body{display:none}</style>\n- <form action=//example.invalid><input name=a>\n> <base href=//example.invalid>",
    "[a](data:text/html,<script>hacked=11</script>) [b](vbscript:x) [c](//example.invalid) [d](file:///etc/passwd)",
    "**<details open ontoggle=hacked=12>** `<body onload=hacked=13>` [<img src=x onerror=hacked=14>](https://example.invalid)",
];

const RICH: &str = "# Vectors\n\nA **vector** grows, *usually* by `push`:\n\n1. Make one.\n   - with `Vec::new`\n   - or `vec![]`\n2. Push.\n\n\
    ```rust\nlet mut list = Vec::new();\nlist.push(1); // <T>\n```\n\n| method | cost |\n|:--|--:|\n| `push` | O(1) |\n| `insert` | O(n) |\n\n\
    > Mind the *capacity*.\n\nSee [the book](https://doc.rust-lang.org/book/) and a_name_with_lines, 2 * 3 * 4.\nA second line.\n\n---\n\n~~Done~~.";

/// A conversation as the page stores it.
fn store(turns: &Value) -> String {
    format!(
        "localStorage.setItem('hpp', JSON.stringify({}))",
        json!({"chats": [{"turns": turns}], "now": 0, "settings": {}})
    )
}

fn turn(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// Opens the page with a stored conversation.
fn open_with(test: &str, turns: &Value) -> Option<(Server, Page)> {
    let browser = chromium(test)?;
    let server = Server::new(&[]);
    let url = server.url.replace("localhost", "127.0.0.1");
    let mut page = Page::open(&browser, &url);
    page.value(&store(turns));
    page.go(&url);
    page.wait_until("$('model').options.length === 1");
    Some((server, page))
}

/// Sends a message and waits for the end of the answer.
fn ask(page: &mut Page, text: &str) {
    page.value(&format!("$('text').value = {}; $('ask').requestSubmit()", json!(text)));
    page.wait_until("running === null");
}

/// The conversation that the page shows: the role of each turn, and what is read on the screen.
fn shown(page: &mut Page) -> Vec<(String, String)> {
    let turns = page.value(
        "[...document.querySelectorAll('.turn')].map(t => [t.classList[1], t.querySelector('.text').innerText])",
    );
    serde_json::from_value(turns).unwrap()
}

/// Presses the button with these words in the last place where it is.
fn press(page: &mut Page, words: &str) {
    page.value(&format!(
        "[...document.querySelectorAll('#talk button')].filter(b => b.textContent === {}).at(-1).click()",
        json!(words)
    ));
}

/// Leaves a picture, PNG in base64, in the folder that `HPP_PICTURES` names.
fn save_picture(page: &mut Page, name: &str) {
    if let Some(dir) = std::env::var_os("HPP_PICTURES") {
        std::fs::write(std::path::Path::new(&dir).join(format!("{name}.base64")), page.picture()).unwrap();
    }
}

#[test]
fn hostile_answers_do_nothing() {
    let turns: Vec<Value> = HOSTILE.iter().flat_map(|text| [turn("user", text), turn("assistant", text)]).collect();
    let Some((_server, mut page)) = open_with("hostile_answers_do_nothing", &json!(turns)) else { return };
    let allowed = "a,b,blockquote,br,button,code,div,em,h2,hr,li,ol,p,pre,s,span,strong,table,tbody,td,th,thead,tr,ul";
    let foreign = page.value(&format!(
        "[...document.querySelectorAll('#talk *')].filter(e => !e.matches('{allowed}') \
         || [...e.attributes].some(a => !['class', 'type', 'href', 'title', 'target', 'rel', 'start', 'style'].includes(a.name)) \
         || e.href && !/^https?:/.test(e.href)).map(e => e.outerHTML)"
    ));
    assert_eq!(foreign, json!([]));
    page.value("document.querySelectorAll('#talk a').forEach(a => { a.target = ''; a.onclick = e => e.preventDefault(); a.click(); })");
    assert_eq!(page.value("window.hacked === undefined && document.querySelectorAll('#talk a').length"), json!(2));
    let text = page.value("$('talk').innerText");
    for words in [
        "<img src=x onerror=\"window.hacked = 1\">",
        "<script>window.hacked = 2</script>",
        "(javascript:window.hacked=3)",
    ] {
        assert!(text.as_str().unwrap().matches(words).count() >= 2, "what the model wrote is read: {text}");
    }
    let loaded =
        "performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith(location.origin))";
    assert_eq!(page.value(loaded), json!([]));
    assert_eq!(page.console, [""; 0]);
    // Were it HTML nevertheless, the policy would refuse it, and this test would see that.
    page.value(
        "document.querySelector('.text').innerHTML = '<img src=x onerror=\"hacked = 1\"><svg onload=\"hacked = 1\">'",
    );
    page.value("new Promise(done => setTimeout(done, 300))");
    assert_eq!(page.value("window.hacked === undefined"), json!(true));
    assert!(page.console.iter().any(|line| line.contains("Content Security Policy")), "{:?}", page.console);
}

#[test]
fn answers_are_shown_as_markdown() {
    let turns = json!([turn("user", "What is **a** vector?\n# x"), turn("assistant", RICH)]);
    let Some((_server, mut page)) = open_with("answers_are_shown_as_markdown", &turns) else { return };
    let mut count =
        |selector: &str| page.value(&format!("document.querySelectorAll('.assistant .text {selector}').length"));
    let expected =
        [("h2", 1), ("strong", 1), ("em", 2), ("ol > li", 2), ("ol > li > ul > li", 2), ("pre code", 1), ("th", 2)];
    for (selector, number) in expected {
        assert_eq!(count(selector), json!(number), "{selector}");
    }
    for (selector, number) in [("td", 4), ("blockquote em", 1), ("a", 1), ("hr", 1), ("s", 1), ("p", 8)] {
        assert_eq!(count(selector), json!(number), "{selector}");
    }
    assert_eq!(
        page.value("document.querySelector('pre').textContent"),
        json!("let mut list = Vec::new();\nlist.push(1); // <T>")
    );
    assert_eq!(page.value("document.querySelectorAll('td')[1].style.textAlign"), json!("right"));
    assert_eq!(shown(&mut page)[0].1, "What is **a** vector?\n# x", "a person's message is shown as it was written");
    page.value("navigator.clipboard.writeText = async text => { window.copied = text; }");
    page.value("document.querySelector('.code button').click()");
    page.wait_until("document.querySelector('.code button').textContent === 'Copied'");
    assert_eq!(page.value("copied"), json!("let mut list = Vec::new();\nlist.push(1); // <T>"));
    for (width, colors) in [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")] {
        page.look(width, 900, colors);
        let fits = page.value(
            "document.documentElement.scrollWidth <= innerWidth && $('talk').scrollWidth <= $('talk').clientWidth",
        );
        assert_eq!(fits, json!(true), "{width} pixels");
        save_picture(&mut page, &format!("page-{width}-{colors}"));
    }
    assert_eq!(page.console, [""; 0]);
}

#[test]
fn wide_answers_fit_on_a_phone() {
    let (word, row) = ("x".repeat(300), "| a cell of a table ".repeat(12));
    let wide = format!("{word}\n\n```\n{word}\n```\n\n{row}|\n{rule}|\n{row}|\n\n- `{word}`", rule = "|---".repeat(12));
    let turns = json!([turn("user", &word), turn("assistant", &wide)]);
    let Some((_server, mut page)) = open_with("wide_answers_fit_on_a_phone", &turns) else { return };
    page.look(390, 844, "light");
    save_picture(&mut page, "wide");
    let widths = "[$('talk').scrollWidth - $('talk').clientWidth, document.documentElement.scrollWidth - innerWidth]";
    assert_eq!(page.value(widths), json!([0, 0]));
    let scrolls = "[...document.querySelectorAll('pre, .scroll')].map(e => e.scrollWidth > e.clientWidth)";
    assert_eq!(page.value(scrolls), json!([true, true]), "code and tables scroll by themselves");
}

#[test]
fn a_full_storage_does_not_end_the_conversation() {
    let test = "a_full_storage_does_not_end_the_conversation";
    let Some((_server, mut page)) = open_with(test, &json!([])) else { return };
    page.value("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }");
    page.value("$('max_tokens').value = 3");
    ask(&mut page, "What is ownership?");
    assert_eq!(shown(&mut page).len(), 2);
    assert!(page.value("$('title').textContent").as_str().unwrap().starts_with("Not kept"));
    assert_eq!(page.console, [""; 0]);
}

#[test]
fn long_repetitions_are_shown_quickly() {
    let Some((_server, mut page)) = open_with("long_repetitions_are_shown_quickly", &json!([])) else { return };
    let repeated = [
        "*", "`", "**a", "_a ", "[", "![", "[a](", "> ", ">", "- ", "  - a\n", "# ", "|", "|-", " ", "\\", "a\n",
        "1. a\n\n", "~~", "http://", "- - ",
    ];
    for piece in repeated {
        let text = format!(
            "'# ' + {piece}.repeat(100000 / {piece}.length) + 'x\\n\\n' + {piece}.repeat(100000 / {piece}.length) + 'x'",
            piece = json!(piece)
        );
        let took = page.value(&format!(
            "(() => {{ const began = performance.now(); markdown({text}); return performance.now() - began; }})()"
        ));
        assert!(took.as_f64().unwrap() < 5000.0, "{piece:?} takes {took} ms");
    }
}

#[test]
fn a_conversation_goes_on_after_a_restart_of_the_server() {
    let Some(browser) = chromium("a_conversation_goes_on_after_a_restart_of_the_server") else { return };
    let dir = tempfile::tempdir().unwrap();
    // The browser keeps conversations for an address, which has a port.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let args = ["--port", &free, "--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16"];
    let mut server = Server::new(&args);
    let url = server.url.clone();
    let mut page = Page::open(&browser, &url);
    page.wait_until("$('model').options.length === 1");
    page.value("$('max_tokens').value = 40; $('max_tokens').onchange()");
    ask(&mut page, "What does Vec::push do?");
    let before = shown(&mut page);
    assert!(before.len() == 2 && !before[1].1.is_empty(), "{before:?}");
    server.stop_and_start(&args);
    assert_eq!(server.url, url);
    page.go(&url);
    page.wait_until("$('model').options.length === 1");
    assert_eq!(shown(&mut page), before, "the conversation is still there");
    page.wait_until("/^[1-9][0-9]* of [0-9]+ tokens kept$/.test($('kept').textContent)");
    ask(&mut page, "And what does pop do?");
    let after = shown(&mut page);
    assert_eq!((after.len(), &after[..2]), (4, &before[..]));
    let note = page.value("chat().turns.at(-1).note");
    let kept = note.as_str().unwrap().split_once(" kept)").and_then(|(start, _)| start.rsplit_once('('));
    let kept: u64 = kept.unwrap_or_else(|| panic!("{note}")).1.parse().unwrap();
    let prompt = page.value("chat().turns[1].note");
    let prompt: u64 =
        prompt.as_str().unwrap().split(" prompt tokens").next().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert!(kept > prompt, "of its answer too: {kept} of {note}");
    assert_eq!(page.console, [""; 0]);
}

#[test]
fn the_panel_shows_where_each_layer_lies() {
    let Some(browser) = chromium("the_panel_shows_where_each_layer_lies") else { return };
    let blocks = ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"];
    let mut plan = chat_plan(MODEL);
    plan.plan.partitions[0].blocks = blocks.map(str::to_owned).to_vec();
    plan.save();
    let server = Server::start(plan, &["--kv-page", "16"]);
    let mut page = Page::open(&browser, &format!("{}/#machine", server.url));
    page.wait_until("document.querySelectorAll('#places .place').length === 1");
    let squares = page.value("[...document.querySelectorAll('#places .blocks i')].map(i => [i.className, i.title])");
    assert_eq!(squares, json!(blocks.map(|block| ["ram".to_owned(), format!("{block}: RAM")])));
    let line = page.value("$('places').innerText");
    assert!(line.as_str().unwrap().starts_with("RAM: embedding, layers 0-3, head, "), "{line}");
    ask(&mut page, &"What does Vec::push do? ".repeat(8));
    page.wait_until(
        "/KV pages: [1-9][0-9]* \\([0-9.]+ MiB\\) in RAM, 0 \\(0.0 MiB\\) on disk/.test($('state').innerText)",
    );
    // The prompt's pages are in no tier yet; asked again, its sequence has them.
    let shows = |page: &mut Page, line: &str| page.wait_until(&format!("/{line}/.test($('state').innerText)"));
    let states = "states: 0.0 MiB in VRAM, [1-9][0-9.]* MiB in RAM, 0.0 MiB on disk, 1 idle sequences";
    shows(&mut page, states);
    shows(&mut page, "pages found: 0 % of [1-9][0-9]* \\(0 in kept sequences, 0 in RAM, 0 on disk\\)");
    press(&mut page, "Regenerate");
    page.wait_until("running === null");
    shows(&mut page, "pages found: 50 % of [1-9][0-9]* \\([1-9][0-9]* in kept sequences, 0 in RAM, 0 on disk\\)");
    let of_other_places = "drawPlaces([
        {device: 'cpu', weights: 'mapped', bytes: 1, blocks: ['embedding']},
        {device: 'gpu0', weights: 'resident', bytes: 2, blocks: ['layers.2', 'head']},
        {device: 'cpu', weights: 'streamed', bytes: 4, locked_bytes: 2, blocks: ['layers.0', 'layers.10']},
        {device: 'gpu0', weights: 'streamed', bytes: 4, blocks: ['layers.1']}], n => n + ' bytes');
        [[...document.querySelectorAll('#places .blocks i')].map(i => i.className + ' ' + i.style.getPropertyValue('--in-ram')),
         [...document.querySelectorAll('#places .place')].map(p => p.innerText.trim())]";
    let expected = json!([
        ["disk 0%", "disk 50%", "streamed 0%", "vram 0%", "disk 50%", "vram 0%"],
        [
            "disk, rows read as needed: embedding, 1 bytes",
            "VRAM of gpu0: layers.2, head, 2 bytes",
            "disk, read for each pass: layers.0, layers.10, 4 bytes, 2 bytes of it stay in RAM",
            "RAM or disk, copied to gpu0 for each pass: layers.1, 4 bytes",
        ]
    ]);
    assert_eq!(page.value(of_other_places), expected);
    for (width, colors) in [(1200, "light"), (1200, "dark"), (390, "light")] {
        page.look(width, 800, colors);
        page.value("$('side').classList.add('open'); look()");
        page.wait_until("document.querySelectorAll('#places .blocks i').length === 6");
        save_picture(&mut page, &format!("machine-{width}-{colors}"));
    }
    // Chromium notes this where the page is drawn before its field has the focus.
    page.console.retain(|line| !line.contains("Autofocus processing was blocked"));
    assert_eq!(page.console, [""; 0]);
}

#[test]
fn keys_open_a_new_chat_and_go_from_one_to_the_next() {
    let Some(browser) = chromium("keys_open_a_new_chat_and_go_from_one_to_the_next") else { return };
    let server = Server::new(&[]);
    let mut page = Page::open(&browser, &server.url);
    let press = |page: &mut Page, code: &str, alt: bool| {
        page.value(&format!(
            "$('text').dispatchEvent(new KeyboardEvent('keydown', {{code: '{code}', key: 'x', altKey: {alt}, bubbles: true, cancelable: true}}))"
        ))
    };
    page.value("store.chats = ['a', 'b'].map(content => ({turns: [{role: 'user', content}]})); store.now = 0; draw()");
    let shows = |page: &mut Page| page.value("[$('title').textContent, store.chats.length]");
    assert_eq!(press(&mut page, "ArrowDown", true), json!(false), "the browser does nothing of its own");
    assert_eq!(shows(&mut page), json!(["b", 2]));
    press(&mut page, "ArrowDown", true);
    assert_eq!(shows(&mut page), json!(["b", 2]), "it is the last");
    press(&mut page, "ArrowUp", true);
    assert_eq!(press(&mut page, "ArrowUp", false), json!(true), "without Alt, keys are for the text");
    assert_eq!(press(&mut page, "KeyN", false), json!(true));
    assert_eq!(shows(&mut page), json!(["a", 2]));
    press(&mut page, "KeyN", true);
    assert_eq!(shows(&mut page), json!(["New chat", 3]));
    assert_eq!(page.value("document.activeElement.id"), json!("text"));
    assert_eq!(page.console, [""; 0]);
}

#[test]
fn messages_are_edited_and_answers_are_regenerated_and_stopped() {
    let test = "messages_are_edited_and_answers_are_regenerated_and_stopped";
    let Some((_server, mut page)) = open_with(test, &json!([])) else { return };
    page.value("$('max_tokens').value = 12");
    ask(&mut page, "What does Vec::push do?");
    ask(&mut page, "And pop?");
    let first = shown(&mut page);
    assert_eq!(
        first.iter().map(|(role, _)| role.as_str()).collect::<Vec<_>>(),
        ["user", "assistant", "user", "assistant"]
    );
    assert!(first.iter().all(|(_, text)| !text.is_empty()), "{first:?}");
    press(&mut page, "Regenerate");
    page.wait_until("running === null");
    assert_eq!(shown(&mut page), first, "greedy answers are the same again");
    assert_eq!(page.value("chat().turns.length"), json!(4));
    // Of the second message, cancelled first; then of the first, which drops what followed.
    press(&mut page, "Edit");
    assert_eq!(page.value("document.querySelector('.turn textarea').value"), json!("And pop?"));
    press(&mut page, "Cancel");
    assert_eq!(shown(&mut page), first);
    page.value("document.querySelector('.turn.user .foot button').click()");
    page.value("document.querySelector('.turn textarea').value = 'What is ownership?'");
    page.look(390, 844, "light");
    save_picture(&mut page, "edit");
    press(&mut page, "Send");
    page.wait_until("running === null");
    let edited = shown(&mut page);
    assert_eq!((edited.len(), edited[0].1.as_str()), (2, "What is ownership?"));
    ask(&mut page, "What is ownership?");
    page.value("$('new').click(); $('max_tokens').value = 12");
    ask(&mut page, "What is ownership?");
    assert_eq!(shown(&mut page), edited, "as if it had been asked so at first");
    // An answer that would not end: a stopped one keeps what came.
    page.value("(f => { fetch = (url, o) => f(url, o?.body ? { ...o, body: JSON.stringify({ ...JSON.parse(o.body), ignore_eos: true }) } : o); })(fetch)");
    page.value("$('max_tokens').value = 400; $('text').value = 'Go on'; $('ask').requestSubmit()");
    page.wait_until("chat().turns.at(-1).content.length > 0");
    assert_eq!(
        page.value("[$('send').textContent, document.querySelectorAll('#talk button').length]"),
        json!(["Stop", 0])
    );
    page.value("$('ask').requestSubmit()");
    page.wait_until("running === null");
    let note = page.value("[...document.querySelectorAll('.foot')].at(-1).innerText");
    assert!(note.as_str().unwrap().contains("stopped"), "{note}");
    assert_eq!(page.value("JSON.parse(localStorage.getItem('hpp')).chats[0].turns.length"), json!(4), "it is kept");
    assert_eq!(page.console, [""; 0]);
}
