// Which view is shown, and what the top of the page says of the server.

import { get } from "./api.js";
import { setModel, startAsk } from "./ask.js";
import { $ } from "./dom.js";
import { showModels } from "./models.js";
import { showNow, startNow } from "./now.js";
import { showSettings } from "./settings.js";

const VIEWS = ["ask", "now", "models", "settings"];
const STATES = {
  ready: "Ready",
  starting: "Starting",
  restarting: "Restarting",
  unresponsive: "Not responding",
  failed: "Failed",
  stopping: "Stopping",
  stopped: "Stopped",
};

function route() {
  const name = VIEWS.find((view) => `#${view}` === location.hash) ?? VIEWS[0];
  for (const section of document.querySelectorAll(".view")) section.hidden = section.dataset.view !== name;
  for (const link of document.querySelectorAll("nav a"))
    link.hash === `#${name}`
      ? link.setAttribute("aria-current", "page")
      : link.removeAttribute("aria-current");
  document.body.dataset.view = name;
  showNow(name === "now");
  if (name === "models") showModels();
  if (name === "settings") showSettings();
  scrollTo(0, name === "ask" ? document.scrollingElement.scrollHeight : 0);
}

let knowsModel = false;
let timer = null;

/** The state of the server: often while it is not ready, seldom when it is. */
async function watch() {
  const state = await readState();
  $("state").dataset.state = state.name;
  $("state").textContent = state.text;
  if (state.name === "ready" && !knowsModel) await readModel();
  if (state.name === "failed" || state.name === "unreachable") knowsModel = false;
  clearTimeout(timer);
  timer = setTimeout(watch, state.name !== "ready" ? 1000 : document.hidden ? 60000 : 10000);
}

async function readState() {
  try {
    const response = await fetch("health/ready", { cache: "no-store" });
    const { status, progress } = await response.json();
    const done = progress ? ` ${Math.round(100 * progress.fraction)} %` : "";
    return { name: status, text: (STATES[status] ?? status) + done };
  } catch {
    return { name: "unreachable", text: "Not reachable" };
  }
}

async function readModel() {
  try {
    const { data } = await get("v1/models");
    setModel(data[0]);
    $("model-name").textContent = data[0].id;
    document.title = `${data[0].id} – vlm_server`;
    knowsModel = true;
  } catch {
    // a key is missing, or nothing answers: tried again with the next look at the state
  }
}

addEventListener("hashchange", route);
addEventListener("trouble", watch);
startAsk();
startNow();
route();
watch();
