// The composer: what is attached and asked, and the keys.

import { later } from "./api.js";
import { attachment, isMedia, preview } from "./attachments.js";
import { $, count, h, icon, inline } from "./dom.js";
import { closeOptions, imageLimits, offerComparisons, pictureTokens, setModels as setChoice, startOptions, ways } from "./options.js";
import { hintAtToy, offerSample, startHint } from "./sample.js";
import * as session from "./session.js";
import { closeHistory, startHistory } from "./sidebar.js";

/** What `/v1/models` says of all models. */
export function setModels(models) {
  setChoice(models);
  hintAtToy(models);
}

const DRAFT = "vlm_server draft";

let attached = [];
let recalled = -1;

export function startAsk() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    session.isRunning() ? session.stop() : submit();
  });
  const question = $("question");
  question.addEventListener("input", () => {
    recalled = -1;
    grow();
  });
  question.addEventListener("keydown", questionKey);
  document.addEventListener("keydown", pageKey);
  for (const id of ["choose", "well"]) $(id).addEventListener("click", () => $("files").click());
  for (const id of ["files", "photo"])
    $(id).addEventListener("change", ({ target }) => {
      attach([...target.files]);
      target.value = "";
    });
  $("photograph").addEventListener("click", takePhotograph);
  $("capture").addEventListener("click", () => capture("screen"));
  $("capture").hidden = !navigator.mediaDevices?.getDisplayMedia;
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files].filter(isMedia);
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  });
  $("suggestions").addEventListener("click", ({ target }) => {
    if (target.localName !== "button") return;
    question.value = target.textContent;
    submit();
  });
  $("new").addEventListener("click", startAnew);
  for (const name of ["run", "opened", "options"]) addEventListener(name, showAll);
  addEventListener("written", followEnd);
  const grown = new ResizeObserver(followEnd);
  for (const name of ["thread", "composer"]) grown.observe($(name));
  addEventListener("opened", () => requestAnimationFrame(() => (session.numTurns() ? toEnd() : page.scrollTo(0, 0))));
  session.onTrouble((text) => ($("trouble").textContent = text));
  takeDrops();
  startOptions();
  startHint();
  startHistory({ startAnew });
  offerSample((file, text) => attach([file]).then(() => ((question.value = text), submit())));
  recallDraft();
  session.reopen().then(showAll);
  showAll();
}

function startAnew() {
  discard();
  session.startAnew();
  location.hash = "#ask";
  $("question").value = "";
  grow();
  $("question").focus();
}

/** What is being typed stays if the page is loaded again. */
function recallDraft() {
  $("question").value ||= sessionStorage.getItem(DRAFT) ?? "";
  sessionStorage.removeItem(DRAFT);
  grow();
  addEventListener("pagehide", () => sessionStorage.setItem(DRAFT, $("question").value));
}

// ---- keys -----------------------------------------------------------------------------------

function questionKey(event) {
  const box = $("question");
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    if (!session.isRunning()) submit();
  } else if (["ArrowUp", "ArrowDown"].includes(event.key)) {
    const asked = session.lastQuestions();
    const isOwn = recalled >= 0 && box.value === asked[recalled];
    if (box.value && !isOwn) return;
    const next = recalled + (event.key === "ArrowUp" ? 1 : -1);
    if (next >= asked.length || next < -1) return;
    event.preventDefault();
    recalled = next;
    box.value = asked[next] ?? "";
    grow();
  }
}

function pageKey(event) {
  if (document.querySelector("dialog[open]") || $("question").closest(".view").hidden || event.defaultPrevented) return;
  const isCommand = event.ctrlKey || event.metaKey;
  const isField = event.target.closest?.("input, textarea, select");
  if (event.key === "Escape") {
    if (closeHistory() || closeOptions()) event.preventDefault();
    else if (session.isRunning()) session.stop();
  } else if (event.key === "Enter" && isCommand && event.target !== $("question")) {
    if (event.target.closest(".edit") || session.isRunning()) return;
    event.preventDefault();
    submit();
  } else if (event.key === "/" && !isField && !isCommand) {
    event.preventDefault();
    $("question").focus();
  }
}

// ---- what is attached -------------------------------------------------------------------------

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

/** A touch screen has a camera's own app; elsewhere the page shows what the camera sees. */
function takePhotograph() {
  if (matchMedia("(pointer: coarse)").matches || !navigator.mediaDevices?.getUserMedia) $("photo").click();
  else capture("camera");
}

async function capture(kind) {
  try {
    const file = await (await later("./capture.js"))?.[kind]();
    if (file) await attach([file]);
  } catch (error) {
    showAttached([error.message]);
  }
}

async function attach(files) {
  const problems = [];
  for (const file of files) {
    try {
      attached.push(await attachment(file, imageLimits()));
    } catch (error) {
      problems.push(error.message);
    }
  }
  const most = imageLimits()?.max_images;
  if (most && attached.filter(({ kind }) => kind === "image").length > most)
    problems.push(`The server takes at most ${count(most)} pictures with a conversation.`);
  showAttached(problems);
  $("question").focus();
}

function discard() {
  for (const { url } of attached) URL.revokeObjectURL(url);
  attached = [];
  showAttached();
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
      const button = { type: "button", class: "remove", "aria-label": `Remove ${one.name}`, onclick: remove };
      return h(`li.${one.kind}`, preview(one), one.kind === "document" && pagesField(one), h("button", button, icon("close")));
    }),
    ...problems.map((problem) => h("li.problem", { role: "alert" }, inline(problem))),
  );
  showAll();
}

/** Which pages of a document are shown to the model. */
function pagesField(one) {
  const field = h("input", {
    "aria-label": `Pages of ${one.name}`,
    placeholder: "All pages",
    title: "Such as 1-3, 7 or 5-",
    pattern: "\\s*\\d+(\\s*-\\s*\\d*)?(\\s*,\\s*\\d+(\\s*-\\s*\\d*)?)*\\s*",
    oninput: () => {
      one.pages = field.validity.valid ? field.value.replace(/\s/g, "") : "";
      field.setAttribute("aria-invalid", String(!field.validity.valid));
    },
  });
  field.value = one.pages ?? "";
  return field;
}

// ---- asking -----------------------------------------------------------------------------------

/** Sends what is attached and asked. */
function submit() {
  const text = $("question").value.trim();
  if (session.isRunning() || (!text && !attached.length)) return;
  const invalid = document.querySelector("#attachments [aria-invalid=true]");
  if (invalid) return invalid.focus();
  const asked = ways();
  if (!asked) return;
  const focused = document.activeElement;
  if (closeOptions()) focused.focus(); // options would cover the answer
  const media = attached;
  attached = [];
  recalled = -1;
  $("question").value = "";
  session.submit(text || "What is in this picture?", media, asked);
  grow();
  showAttached();
  toEnd(true);
}

/** Shows what can be done now. */
function showAll() {
  const hasTurns = session.numTurns() > 0;
  $("attachments").hidden = !$("attachments").children.length;
  $("welcome").hidden = hasTurns;
  for (const id of ["invitation", "well", "sample"]) $(id).hidden = attached.length > 0;
  $("stage").hidden = attached.length !== 1;
  $("several").hidden = attached.length < 2;
  $("stage").replaceChildren(...(hasTurns ? [] : attached.map((one) => preview(one))));
  $("question").placeholder = attached.length ? "Ask about it" : hasTurns ? "Ask more" : "Ask a question";
  const tokens = pictureTokens(attached);
  $("cost").textContent = tokens === null ? "" : `About ${count(tokens)} tokens`;
  offerComparisons([...session.media(), ...attached]);
  $("new").hidden = !hasTurns;
  showSend();
}

function showSend() {
  const button = $("send");
  const isRunning = session.isRunning();
  const label = isRunning ? "Stop" : "Send";
  if (button.getAttribute("aria-label") !== label) {
    button.setAttribute("aria-label", label);
    button.replaceChildren(icon(isRunning ? "stop" : "send"));
  }
  button.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
  const isEmpty = !$("question").value.trim();
  $("suggestions").hidden = !attached.length || !isEmpty || session.numTurns() > 0 || !$("options").hidden;
  button.disabled = !isRunning && !attached.length && isEmpty;
}

function grow() {
  const box = $("question");
  if (!CSS.supports("field-sizing: content")) {
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
  }
  showSend();
}

const page = document.scrollingElement;
let wasAtEnd = true;
let lastTop = 0;
addEventListener("scroll", followScroll, { passive: true });

/** Only scrolling up leaves the end: a smooth way to it is not there yet. */
function followScroll() {
  const isUp = page.scrollTop < lastTop;
  lastTop = page.scrollTop;
  wasAtEnd = page.scrollHeight - page.scrollTop - innerHeight < 120 || (wasAtEnd && !isUp);
}

/** Stays at the end while an answer is written, unless the reader has scrolled away. */
function followEnd() {
  if (wasAtEnd) requestAnimationFrame(() => requestAnimationFrame(() => toEnd()));
}

function toEnd(smooth = false) {
  if ($("thread").closest(".view").hidden) return; // another view is read
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  page.scrollTo({ top: page.scrollHeight, behavior: smooth && !calm ? "smooth" : "auto" });
}
