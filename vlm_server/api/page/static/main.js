// Which view is shown, and what the top of the page says of the server.

import { get } from "./api.js";
import { setModels, startAsk } from "./ask.js";
import { $ } from "./dom.js";
import { showModels } from "./models.js";
import { showNow } from "./now.js";
import { isBusy, stateWords } from "./serving.js";
import { showSettings } from "./settings.js";
import { setWatchModels, showWatch } from "./watch.js";

const VIEWS = ["ask", "watch", "now", "models", "settings"];

function route() {
  const name = VIEWS.find((view) => `#${view}` === location.hash) ?? VIEWS[0];
  for (const section of document.querySelectorAll(".view")) section.hidden = section.dataset.view !== name;
  for (const link of document.querySelectorAll("nav a"))
    link.hash === `#${name}`
      ? link.setAttribute("aria-current", "page")
      : link.removeAttribute("aria-current");
  document.body.dataset.view = name;
  if (name === "watch") showWatch();
  if (name === "now") showNow();
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
  if (state.name === "ready" && (state.isOfSeveral || !knowsModel)) await readModels();
  if (state.name === "failed" || state.name === "unreachable") knowsModel = false;
  clearTimeout(timer);
  timer = setTimeout(watch, !state.isCalm ? 1000 : document.hidden ? 60000 : 10000);
}

async function readState() {
  try {
    const response = await fetch("health/ready", { cache: "no-store" });
    const { status, progress, models } = await response.json();
    const states = Object.values(models ?? {});
    const loaded = states.filter((state) => state === "ready").length;
    const done = progress ? ` ${Math.round(100 * progress.fraction)} %` : "";
    const isReady = status === "ready";
    return {
      name: status,
      text: isReady && models ? `${loaded} of ${states.length} loaded` : stateWords(status) + done,
      isOfSeveral: Boolean(models),
      isCalm: isReady && !states.some(isBusy),
    };
  } catch {
    return { name: "unreachable", text: "Not reachable" };
  }
}

async function readModels() {
  try {
    const { data } = await get("v1/models");
    setModels(data);
    setWatchModels(data);
    const name = data.length > 1 ? `${data.length} models` : data[0].id;
    $("model-name").textContent = name;
    document.title = `${name} – vlm_server`;
    knowsModel = true;
  } catch {
    // a key is missing, or nothing answers: tried again with the next look at the state
  }
}

addEventListener("hashchange", route);
addEventListener("trouble", watch);
startAsk();
route();
watch();
