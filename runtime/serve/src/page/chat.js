const $ = id => document.getElementById(id);
const fields = ["system", "temperature", "top_p", "max_tokens", "key", "model"];
let store = { chats: [], now: 0, settings: {} };
try { store = Object.assign(store, JSON.parse(localStorage.getItem("hpp") || "{}")); } catch {}
if (!store.chats.length) store.chats.push({ turns: [] });
let running = null;
/* Whether the running answer has no token yet. */
let waiting = false;
/* The models as the server described them last. */
let served = [];

const chat = () => store.chats[Math.min(store.now, store.chats.length - 1)];
/* Where the browser's storage is full or forbidden, the conversation goes on and is not kept. */
let isKept = true;
function save() {
  try { localStorage.setItem("hpp", JSON.stringify(store)); isKept = true; } catch { isKept = false; }
}
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), b => b.toString(16).padStart(2, "0")).join("");
const title = c => (c.turns[0]?.content || "New chat").slice(0, 60);

function draw() {
  $("chats").replaceChildren(...store.chats.map(chatButton));
  $("kept").textContent = "";
  $("title").textContent = isKept ? title(chat()) : "Not kept: the browser's storage is full or forbidden";
  $("talk").replaceChildren(...chat().turns.map(view));
  $("talk").scrollTop = $("talk").scrollHeight;
  $("send").textContent = running ? "Stop" : "Send";
}

function showChat(i) {
  if (running) return;
  store.now = i;
  save();
  draw();
  $("side").classList.remove("open");
  prefetch();
}

/* Lets the server read the states of an earlier conversation into memory, and shows how much of it is stored. Loads no model for that. */
async function prefetch() {
  const opened = chat();
  if (running || !opened.id || served.find(m => m.id === $("model").value)?.state !== "loaded") return;
  const body = JSON.stringify({ ...request(), prefetch: true, stream: undefined, stream_options: undefined });
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body }).catch(() => null);
  const usage = response?.ok && (await response.json()).usage;
  if (!usage || running || chat() !== opened) return;
  $("kept").textContent = `${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} tokens kept`;
}

function chatButton(c, i) {
  return element("button", [title(c)], { type: "button", className: c === chat() ? "now" : "", onclick: () => showChat(i) });
}

function view(turn, at) {
  const isUser = turn.role === "user";
  const text = element("div", isUser ? [turn.content] : markdown(turn.content), { className: "text" });
  const box = element("div", [element("b", [isUser ? "You" : "Model"]), text], { className: "turn " + turn.role });
  if (turn.error) box.append(element("div", [turn.error], { className: "note error" }));
  const foot = element("div", running ? [] : actions(turn, at), { className: "foot note" });
  if (turn.note) foot.append(element("span", [turn.note]));
  box.append(foot);
  return box;
}

function actions(turn, at) {
  const button = (words, onclick) => element("button", [words], { type: "button", className: "small", onclick });
  if (turn.role === "user") return [button("Edit", () => edit(turn, at))];
  const copies = turn.content ? [copyButton(() => turn.content)] : [];
  return at === chat().turns.length - 1 ? [...copies, button("Regenerate", () => answerFrom(at))] : copies;
}

/* Shows a message of the user as a field. When it is sent, what followed it is answered anew. */
function edit(turn, at) {
  const field = element("textarea", [], { value: turn.content, rows: 1, ariaLabel: "Message" });
  const send = () => {
    const content = field.value.trim();
    if (!content || running) return;
    turn.content = content;
    answerFrom(at + 1);
  };
  field.onkeydown = event => { if (sends(event)) { event.preventDefault(); send(); } };
  const buttons = [element("button", ["Send"], { type: "button", className: "main", onclick: send }),
    element("button", ["Cancel"], { type: "button", onclick: draw })];
  $("talk").children[at].replaceChildren(element("b", ["You"]), field, element("div", buttons, { className: "foot" }));
  field.oninput = () => grow(field);
  grow(field);
  field.focus();
}

/* Makes a field as high as its text, up to its `max-height`. */
function grow(field) {
  field.style.height = "auto";
  field.style.height = field.scrollHeight + field.offsetHeight - field.clientHeight + "px";
}

/* Drops the turns from here on and answers what is before them. */
function answerFrom(at) {
  if (running) return;
  chat().turns.length = at;
  if (at) answer();
}

function request() {
  const number = id => $(id).value === "" ? undefined : Number($(id).value);
  const system = $("system").value.trim();
  const turns = chat().turns.filter(t => !t.error || t.content).map(({ role, content }) => ({ role, content }));
  return {
    model: $("model").value || undefined,
    messages: (system ? [{ role: "system", content: system }] : []).concat(turns),
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"),
    session_id: chat().id ||= newId(),
    stream: true, stream_options: { include_usage: true },
  };
}

/* Whether each model is loaded, beside its name; the chosen one stays chosen. */
function drawModels() {
  const words = m => m.state === "loaded" ? m.id : `${m.id} (${m.state})`;
  const options = [...$("model").options], chosen = $("model").value || store.settings.model;
  if (served.length === options.length && served.every((m, i) => m.id === options[i].value)) {
    served.forEach((m, i) => { options[i].textContent = words(m); });
    return;
  }
  $("model").replaceChildren(...served.map(m => new Option(words(m), m.id)));
  if (served.some(m => m.id === chosen)) $("model").value = chosen;
}

/* Looks at the models, and at what the machine does while its panel is open. */
async function look() {
  const isOpen = $("machine").open;
  if (document.hidden || !isOpen && !waiting && served.every(m => m.state === "loaded")) return;
  try {
    const [models, text] = await Promise.all([fetch("v1/models", { headers: headers() }).then(r => r.json()),
      isOpen ? fetch("metrics", { headers: headers() }).then(r => r.text()) : ""]);
    served = models.data;
    drawModels();
    drawWaiting();
    if (isOpen) machine(text);
  } catch { $("state").textContent = "The server does not answer."; }
}

/* Below an answer that waits for its model. */
function drawWaiting() {
  const state = served.find(m => m.id === $("model").value)?.state;
  if (!waiting) return;
  $("talk").lastElementChild.querySelector(".foot").textContent =
    state === "loaded" ? "" : state === "loading" ? "The model is being loaded." : "Waits for memory to load the model.";
}

/* The memory of some weights, and the words for it. */
function memoryOf({ device, weights }) {
  if (device !== "cpu") {
    return weights === "resident" ? ["vram", `VRAM of ${device}`] : ["streamed", `RAM or disk, copied to ${device} for each pass`];
  }
  return weights === "resident" ? ["ram", "RAM"] : ["disk", weights === "mapped" ? "disk, rows read as needed" : "disk, read for each pass"];
}

/* `embedding, layers 0-2`: names of blocks, consecutive layers as a range. */
function blockNames(names) {
  const parts = [];
  for (const name of names) {
    const [, layers, number] = name.match(/^(.*)\.(\d+)$/) || [], last = parts.at(-1);
    if (layers && last?.layers === layers && last.to === number - 1) last.to = Number(number);
    else parts.push({ name, layers, from: Number(number), to: Number(number) });
  }
  return parts.map(p => p.to > p.from ? `${p.layers} ${p.from}-${p.to}` : p.name).join(", ");
}

/* Where each block of the model lies: a square for each, and a line for each memory. */
function drawPlaces(placement, size) {
  const rank = name => { const number = name.match(/\d+/); return number ? Number(number[0]) : name === "embedding" ? -1 : Infinity; };
  const blocks = placement.flatMap(p => p.blocks.map(name => ({ name, place: p })));
  blocks.sort((a, b) => rank(a.name) - rank(b.name) || 0);
  /* Of what is read from disk, the square shows how much stays in RAM. */
  const square = (place, title) => {
    const made = element("i", [], { className: memoryOf(place)[0], title });
    made.style.setProperty("--in-ram", 100 * (place.locked_bytes || 0) / (place.bytes || 1) + "%");
    return made;
  };
  const places = placement.map(p => {
    const words = memoryOf(p)[1];
    const planned = p.planned_device ? ` (planned for ${p.planned_device})` : "";
    const locked = p.locked_bytes === undefined ? "" : `, ${size(p.locked_bytes)} of it stay in RAM`;
    return element("div", [square(p, words), element("span", [`${words}${planned}: ${blockNames(p.blocks)}, ${size(p.bytes)}${locked}`])],
      { className: "place" });
  });
  const squares = blocks.map(b => square(b.place, `${b.name}: ${memoryOf(b.place)[1]}`));
  $("places").replaceChildren(element("div", squares, { className: "blocks" }), ...places);
}

/* Where each layer lies, requests, and the cache. */
function machine(text) {
  const name = $("model").value, size = bytes =>
    bytes < 2 ** 30 ? (bytes / 2 ** 20).toFixed(1) + " MiB" : (bytes / 2 ** 30).toFixed(2) + " GiB";
  const value = (metric, more = "") => Number(text.split("\n").find(l =>
    l.startsWith(metric + "{") && l.includes(`model="${name}"`) && l.includes(more))?.split(" ").at(-1) || 0);
  const tier = (metric, tier) => value(metric, `tier="${tier}"`);
  const model = served.find(m => m.id === name);
  const hits = { sequences: tier("hpp_kv_hits_total", "sequence"), RAM: tier("hpp_kv_hits_total", "ram"), disk: tier("hpp_kv_hits_total", "disk") };
  const found = hits.sequences + hits.RAM + hits.disk, wanted = found + tier("hpp_kv_misses_total", "disk");
  const passes = value("hpp_passes_total");
  drawPlaces(model?.placement || [], size);
  const lines = [];
  if (served.length > 1) lines.unshift(...served.map(m => `${m.id}: ${m.state}, ${size(m.memory.host)} of RAM`));
  if (model?.error) lines.push(model.error);
  lines.push(`requests: ${value("hpp_requests_running")} running, ${value("hpp_requests_waiting")} waiting`);
  const states = place => size(tier("hpp_state_bytes", place));
  lines.push(`states: ${states("device")} in VRAM, ${states("ram")} in RAM, ${states("disk")} on disk, ${value("hpp_idle_sequences")} idle sequences`);
  const pages = place => `${tier("hpp_kv_pages", place)} (${size(tier("hpp_kv_bytes", place))})`;
  lines.push(`KV pages: ${pages("ram")} in RAM, ${pages("disk")} on disk`);
  if (wanted) lines.push(`pages found: ${(100 * found / wanted).toFixed(0)} % of ${wanted} (${hits.sequences} in kept sequences, ${hits.RAM} in RAM, ${hits.disk} on disk)`);
  if (passes) lines.push(`weights moved: ${size(value("hpp_weights_streamed_bytes_total") / passes)} a pass`);
  $("state").replaceChildren(...lines.map(words => element("div", [words])));
}
$("machine").ontoggle = look;
$("machine").open = location.hash === "#machine";
setInterval(look, 2000);

const headers = () => {
  const all = { "content-type": "application/json" };
  if ($("key").value) all.authorization = "Bearer " + $("key").value;
  return all;
};

/* The events of a streamed answer. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

/* Asks the server, and adds its answer to a turn. */
async function receive(body, turn, seen, show) {
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal: running.signal });
  if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message || response.statusText);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    seen.usage = event.usage || seen.usage;
    const choice = event.choices[0];
    seen.finish = choice?.finish_reason || seen.finish;
    if (!choice?.delta?.content) continue;
    if (!seen.first) {
      seen.first = performance.now();
      waiting = false;
      $("talk").lastElementChild.querySelector(".foot").textContent = "";
    }
    turn.content += choice.delta.content;
    show();
  }
}

/* Draws a growing answer, once for each frame of the screen. */
function painter(turn) {
  const text = $("talk").lastElementChild.querySelector(".text"), talk = $("talk");
  let asked = 0;
  const paint = () => {
    asked = 0;
    const stays = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
    text.replaceChildren(...markdown(turn.content));
    if (stays) talk.scrollTop = talk.scrollHeight;
  };
  return () => { asked ||= requestAnimationFrame(paint); };
}

async function answer() {
  const body = JSON.stringify(request());
  const turn = { role: "assistant", content: "" };
  chat().turns.push(turn);
  running = new AbortController();
  waiting = true;
  save();
  draw();
  setTimeout(look, 300);
  const seen = { began: performance.now(), first: 0, usage: null, finish: "" };
  try { await receive(body, turn, seen, painter(turn)); } catch (error) {
    if (error.name === "AbortError") seen.finish = "stopped";
    else turn.error = error instanceof TypeError ? "The server does not answer." : error.message;
  }
  turn.note = note(seen, performance.now());
  running = null;
  waiting = false;
  save();
  draw();
  $("text").focus();
}

/* How long an answer took, and how many tokens it has. */
function note({ began, first, usage, finish }, end) {
  const parts = [];
  if (first) parts.push(`first token after ${((first - began) / 1000).toFixed(2)} s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens || 0;
    parts.push(`${usage.prompt_tokens} prompt tokens` + (cached ? ` (${cached} kept)` : ""));
    parts.push(`${usage.completion_tokens} new tokens`);
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / (end - first) * 1000).toFixed(1)} tokens/s`);
  }
  if (finish && finish !== "stop") parts.push(finish === "length" ? "the limit of tokens was reached" : finish);
  return parts.join(" · ");
}

const sends = event => event.key === "Enter" && !event.shiftKey && !event.isComposing;
$("ask").onsubmit = event => {
  event.preventDefault();
  if (running) return running.abort();
  const content = $("text").value.trim();
  if (!content) return;
  chat().turns.push({ role: "user", content });
  $("text").value = "";
  grow($("text"));
  answer();
};
$("text").oninput = () => grow($("text"));
$("text").onkeydown = event => {
  if (sends(event)) { event.preventDefault(); if (!running) $("ask").requestSubmit(); }
};
document.onkeydown = event => {
  if (event.key === "Escape") { running?.abort(); $("side").classList.remove("open"); }
  /* The code, because Alt changes the letter on some keyboards. */
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.code];
  if (!event.altKey || event.ctrlKey || event.metaKey || event.code !== "KeyN" && !step) return;
  event.preventDefault();
  if (!step) return newChat();
  const to = store.chats.indexOf(chat()) + step;
  if (store.chats[to]) showChat(to);
};
function newChat() {
  if (running) return;
  store.chats.unshift({ turns: [] });
  store.now = 0;
  save();
  draw();
  $("text").focus();
}
$("new").onclick = newChat;
$("drop").onclick = () => {
  if (running) return;
  store.chats.splice(store.chats.indexOf(chat()), 1);
  if (!store.chats.length) store.chats.push({ turns: [] });
  store.now = 0;
  save();
  draw();
};
$("menu").onclick = () => $("side").classList.toggle("open");

async function models() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    const answer = await response.json();
    if (response.status === 401) throw new Error("Enter the API key in the settings.");
    if (!response.ok) throw new Error(answer.error?.message);
    served = answer.data;
    drawModels();
    look();
    prefetch();
  } catch (error) { $("title").textContent = error.message || "the server does not answer"; }
}
for (const id of fields) {
  if (id !== "model") $(id).value = store.settings[id] || "";
  $(id).onchange = () => { store.settings[id] = $(id).value; save(); if (id === "key") models(); };
}
draw();
models();
