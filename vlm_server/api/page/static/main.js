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
  for (const link of document.querySelectorAll("nav a"))
    link.hash === `#${name}`
      ? link.setAttribute("aria-current", "page")
      : link.removeAttribute("aria-current");
  document.body.dataset.view = name;
  show(name);
  scrollTo(0, name === "ask" && $("thread").children.length ? document.scrollingElement.scrollHeight : 0);
}

let models = []; // what `/v1/models` says of them
let knowsModel = false;
let timer = null;

/** The state of the server: often while it is not ready, seldom when it is. */
async function watch() {
  const state = await readState();
  $("state").dataset.state = state.name;
  $("state").textContent = state.text;
  if (state.name === "ready" && (state.isOfSeveral || !knowsModel)) await readModels();
  if (state.name === "failed" || state.name === "unreachable") knowsModel = false;
  clearTimeout(timer);
  timer = setTimeout(watch, !state.isCalm ? 1000 : document.hidden ? 60000 : 10000);
}

async function readState() {
  try {
    const response = await fetch("health/ready", { cache: "no-store" });
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
    return { name: "unreachable", text: "Not reachable" };
  }
}

async function readModels() {
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
}

addEventListener("hashchange", route);
setTimeout(() => Object.values(VIEWS).forEach(([file]) => load(file).catch(() => null)), LOAD_MS);
document.querySelector("nav").addEventListener("click", ({ target }) => target.closest("a")?.hash === location.hash && route()); // tried again
$("reload").addEventListener("click", () => location.reload());
addEventListener("trouble", watch);
$("theme").addEventListener("change", ({ target: { value } }) => {
  keep("vlm_server theme", value);
  dispatchEvent(new CustomEvent("theme", { detail: value }));
});
startAsk();
route();
watch();
