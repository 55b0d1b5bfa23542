// Which view is shown, and what the top of the page says of the server.

import { get, later, load } from "./api.js";
import { setModels, startAsk } from "./ask.js";
import { $, keep } from "./dom.js";
import { isBusy, stateWords } from "./serving.js";

/** The module of each view, and what shows it. */
const VIEWS = {
  ask: ["./ask.js", () => null],
  watch: ["./watch.js", ({ showWatch }) => showWatch(models)],
  now: ["./now.js", ({ showNow }) => showNow()],
  models: ["./models.js", ({ showModels }) => showModels()],
  connect: ["./connect.js", ({ showConnect }) => showConnect(models)],
  settings: ["./settings.js", ({ showSettings }) => showSettings()],
};
const LOAD_MS = 300; // after the first view is there, the others are loaded

async function show(name) {
  const [file, show] = VIEWS[name];
  const module = await later(file);
  if (module) show(module);
}

function route() {
  const name = Object.keys(VIEWS).find((view) => `#${view}` === location.hash) ?? ((location.hash && document.body.dataset.view) || "ask"); // `#main` keeps the view
  for (const section of document.querySelectorAll(".view")) section.hidden = section.dataset.view !== name;
  for (const link of document.querySelectorAll(".bar a"))
    link.hash === `#${name}`
      ? link.setAttribute("aria-current", "page")
      : link.removeAttribute("aria-current");
  document.body.dataset.view = name;
  show(name);
  scrollTo(0, name === "ask" && $("thread").children.length ? document.scrollingElement.scrollHeight : 0);
}

let models = []; // what `/v1/models` says of them
let knowsModel = false;
let isReading = false;
let timer = null;
let isLooking = false;
let isTroubled = false;

const TROUBLE_MS = 100;
const SOON_MS = 1000;
const CALM_MS = 5000;
const HIDDEN_MS = 60_000;
const ANSWER_MS = 5000; // within which a server that runs answers

function lookIn(pause) {
  clearTimeout(timer);
  timer = setTimeout(watch, pause);
}

/** Something failed: what is under way may have been asked before that. */
const lookSoon = () => (isLooking || isReading ? (isTroubled = true) : lookIn(TROUBLE_MS));

/** The state of the server: often while it is not ready, seldom when it is. */
async function watch() {
  [isLooking, isTroubled] = [true, false];
  const state = await readState();
  isLooking = false;
  $("state").dataset.state = state.name;
  $("state").textContent = state.text;
  if (state.name === "failed" || state.name === "unreachable") knowsModel = false;
  if (state.name === "ready" && (state.isOfSeveral || !knowsModel)) readModels();
  lookIn(!state.isCalm || isTroubled ? SOON_MS : document.hidden ? HIDDEN_MS : CALM_MS);
}

async function readState() {
  try {
    const response = await fetch("health/ready", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    const { status, progress, models: several } = await response.json();
    const states = Object.values(several ?? {});
    const loaded = states.filter((state) => state === "ready").length;
    const done = progress ? ` ${Math.round(100 * progress.fraction)} %` : "";
    const isReady = status === "ready";
    return {
      name: status,
      text: isReady && several ? `${loaded} of ${states.length} loaded` : stateWords(status) + done,
      isOfSeveral: Boolean(several),
      isCalm: isReady && !states.some(isBusy),
    };
  } catch {
    return { name: "unreachable", text: "No connection" };
  }
}

async function readModels() {
  if (isReading) return;
  isReading = true;
  try {
    const { data } = await get("v1/models");
    models = data;
    setModels(data);
    const view = document.body.dataset.view;
    if (view === "watch" || view === "connect") show(view); // they name models
    const name = data.length > 1 ? `${data.length} models` : data[0].id;
    $("model-name").textContent = name;
    document.title = `${name} – vlm_server`;
    knowsModel = true;
  } catch {
    // a key is missing, or nothing answers: tried again with the next look at the state
  }
  isReading = false;
}

addEventListener("hashchange", route);
setTimeout(() => Object.values(VIEWS).forEach(([file]) => load(file).catch(() => null)), LOAD_MS);
document.querySelector(".bar").addEventListener("click", ({ target }) => target.closest("a")?.hash === location.hash && route()); // tried again
$("reload").addEventListener("click", () => location.reload());
for (const name of ["trouble", "online", "offline"]) addEventListener(name, lookSoon);
document.addEventListener("visibilitychange", () => document.hidden || lookSoon());
$("theme").addEventListener("change", ({ target: { value } }) => {
  keep("vlm_server theme", value);
  dispatchEvent(new CustomEvent("theme", { detail: value }));
});
startAsk();
route();
watch();
