// The conversation: what is attached and asked, and the answers to it.

import { Answer } from "./answer.js";
import { ask, events, get } from "./api.js";
import { attachment, isMedia, part } from "./attachments.js";
import { $, h, icon } from "./dom.js";
import { offer } from "./serving.js";

const CLICK_TOOL = [
  {
    type: "function",
    function: {
      name: "click",
      parameters: {
        type: "object",
        properties: { x: { type: "integer" }, y: { type: "integer" } },
        required: ["x", "y"],
      },
    },
  },
];

/** What `/v1/models` says of all models, and of the chosen one. */
let models = [];
let model = null;
let attached = [];
let turns = [];
let running = null;

export function setModels(told) {
  models = told;
  choose();
}

function choose() {
  const name = offer(
    $("ask-model"),
    models.map(({ id }) => id),
  );
  model = models.find(({ id }) => id === name);
  const can = model.capabilities;
  $("think-field").hidden = !can?.includes("thinking");
  document.body.classList.toggle("blind", can?.includes("vision") === false);
}

export function startAsk() {
  const question = $("question");
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    running ? running.abort() : submit();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) submit();
  });
  question.addEventListener("input", grow);
  for (const id of ["choose", "well"]) $(id).addEventListener("click", () => $("files").click());
  $("photograph").addEventListener("click", () => $("photo").click());
  for (const id of ["files", "photo"])
    $(id).addEventListener("change", ({ target }) => {
      attach([...target.files]);
      target.value = "";
    });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files].filter(isMedia);
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  });
  $("show-options").addEventListener("click", toggleOptions);
  $("click-tool").addEventListener("click", () => {
    $("tools").value = JSON.stringify(CLICK_TOOL, null, 1);
    $("tools").rows = 6;
  });
  $("suggestions").addEventListener("click", ({ target }) => {
    if (target.localName !== "button") return;
    question.value = target.textContent;
    submit();
  });
  $("new").addEventListener("click", startAnew);
  $("ask-model").addEventListener("change", choose);
  takeDrops();
  showSend();
}

function takeDrops() {
  let depth = 0;
  const isFiles = (event) => event.dataTransfer?.types.includes("Files");
  const show = (more) => {
    depth = Math.max(0, depth + more);
    $("drop").hidden = !depth;
  };
  document.addEventListener("dragenter", (event) => isFiles(event) && show(1));
  document.addEventListener("dragleave", (event) => isFiles(event) && show(-1));
  document.addEventListener("dragover", (event) => isFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!isFiles(event)) return;
    event.preventDefault();
    show(-depth);
    location.hash = "#ask";
    attach([...event.dataTransfer.files]);
  });
}

async function attach(files) {
  const problems = [];
  for (const file of files) {
    try {
      attached.push(await attachment(file, models.find((one) => one.image_limits)?.image_limits));
    } catch (error) {
      problems.push(error.message);
    }
  }
  showAttached(problems);
  $("question").focus();
}

function showAttached(problems = []) {
  const list = $("attachments");
  list.replaceChildren(
    ...attached.map((one, index) => {
      const remove = () => {
        URL.revokeObjectURL(attached.splice(index, 1)[0].url);
        showAttached();
        $("question").focus();
      };
      return h(
        "li",
        preview(one),
        h(
          "button",
          { type: "button", class: "remove", "aria-label": `Remove ${one.name}`, onclick: remove },
          icon("close"),
        ),
      );
    }),
    ...problems.map((problem) => h("li.problem", { role: "alert" }, problem)),
  );
  list.hidden = !list.children.length;
  for (const id of ["invitation", "well"]) $(id).hidden = Boolean(attached.length);
  $("stage").hidden = !attached.length;
  $("stage").replaceChildren(...(turns.length ? [] : attached.map((one) => preview(one))));
  $("question").placeholder = attached.length ? "Ask about it" : turns.length ? "Ask more" : "Ask a question";
  showSend();
}

const preview = (one, controls = false) =>
  one.kind === "document"
    ? h("p.paper", one.name)
    : one.kind === "video"
    ? h("video", { src: one.url, muted: true, playsinline: true, controls, "aria-label": one.name })
    : h("img", { src: one.url, alt: one.name, width: one.width, height: one.height });

/** Sends what is attached and asked. */
function submit() {
  const text = $("question").value.trim();
  if (!text && !attached.length) return;
  const options = readOptions();
  if (!options) return;
  const turn = { text: text || "What is in this picture?", media: attached, answer: null };
  attached = [];
  $("question").value = "";
  for (const old of document.querySelectorAll(".retry")) old.remove();
  turns.push(turn);
  grow();
  showAttached();
  $("welcome").hidden = true;
  $("new").hidden = false;
  $("thread").append(questionElement(turn));
  answer(turn, options);
}

async function answer(turn, options) {
  turn.answer = null; // one that failed is no part of the conversation
  const body = {
    model: models.length > 1 ? model.id : "default",
    messages: conversation(options.system),
    stream: true,
    stream_options: { include_usage: true },
    ...options.fields,
  };
  const shown = new Answer(
    body,
    turns.flatMap(({ media }) => media),
    model?.coordinates,
  );
  turn.answer = shown;
  $("thread").append(shown.element);
  toEnd(true);
  running = new AbortController();
  showSend();
  if (models.length > 1) showLoad(shown, body.model);
  const ending = {};
  try {
    const response = await ask("v1/chat/completions", { body, signal: running.signal });
    for await (const event of events(response)) {
      const isAtEnd = nearEnd();
      shown.take(event);
      if (isAtEnd) requestAnimationFrame(() => toEnd());
    }
  } catch (error) {
    ending.stopped = error.name === "AbortError";
    ending.error = ending.stopped ? null : error;
    if (ending.error) dispatchEvent(new Event("trouble")); // whoever shows the server's state looks again
    ending.retry = () => {
      if (running) return;
      shown.element.remove();
      answer(turn, options);
    };
  }
  running = null;
  const isAtEnd = nearEnd();
  shown.end(ending);
  if (isAtEnd) toEnd();
  showSend();
}

/** Tells how far the model is while it is loaded for the answer. */
async function showLoad(shown, name) {
  const mine = running;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (shown.first || running !== mine) return;
    const told = await get("v1/models", { quiet: true }).catch(() => null);
    const one = told?.data.find(({ id }) => id === name);
    if (one) shown.wait(one);
    if (one?.state === "ready") return dispatchEvent(new Event("trouble"));
  }
}

/** The messages of all turns. One without an answer is asked along with the next. */
function conversation(system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { text, media, answer: given } of turns) {
    messages.push({ role: "user", content: [...media.map(part), { type: "text", text }] });
    messages.push(...(given?.messages() ?? []));
  }
  return messages;
}

function questionElement({ text, media }) {
  return h(
    "article.asked",
    { "aria-label": "Question" },
    media.length
      ? h(
          "div",
          { class: media.length > 1 ? "media several" : "media" },
          media.map((one) => preview(one, true)),
        )
      : null,
    h("p", text),
  );
}

/** {system, fields}; null if they can't be sent, which is said. */
function readOptions() {
  const fields = {};
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  if (number("max-tokens")) fields.max_tokens = number("max-tokens");
  if (number("temperature") !== undefined) fields.temperature = number("temperature");
  if (!$("think-field").hidden) fields.chat_template_kwargs = { enable_thinking: $("think").checked };
  $("tools-problem").textContent = "";
  if ($("tools").value.trim()) {
    try {
      fields.tools = JSON.parse($("tools").value);
    } catch (error) {
      $("tools-problem").textContent = `The tools are not valid JSON: ${error.message}`;
      toggleOptions(null, true);
      return null;
    }
  }
  return { system: $("system").value.trim(), fields };
}

function toggleOptions(_, open = $("options").hidden) {
  $("options").hidden = !open;
  $("show-options").setAttribute("aria-expanded", String(open));
  showSend();
}

function showSend() {
  const button = $("send");
  const label = running ? "Stop" : "Send";
  if (button.getAttribute("aria-label") !== label) {
    button.setAttribute("aria-label", label);
    button.replaceChildren(icon(running ? "stop" : "send"));
  }
  button.title = label;
  const isEmpty = !$("question").value.trim();
  $("suggestions").hidden = !attached.length || !isEmpty || Boolean(turns.length) || !$("options").hidden;
  button.disabled = !running && !attached.length && isEmpty;
}

function grow() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, 180)}px`;
  showSend();
}

function startAnew() {
  running?.abort();
  for (const { media } of turns) for (const { url } of media) URL.revokeObjectURL(url);
  turns = [];
  $("thread").replaceChildren();
  $("welcome").hidden = false;
  $("new").hidden = true;
  showAttached();
  location.hash = "#ask";
  $("question").focus();
}

const page = document.scrollingElement;
const nearEnd = () => page.scrollHeight - page.scrollTop - innerHeight < 120;
const toEnd = (smooth = false) => {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  page.scrollTo({ top: page.scrollHeight, behavior: smooth && !calm ? "smooth" : "auto" });
};
