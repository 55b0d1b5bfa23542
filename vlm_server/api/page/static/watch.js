// A watch: a camera's or a screen's frames go to the server with a question; changed answers come back.

import { ask, events } from "./api.js";
import { $, clock, empty, h, inline } from "./dom.js";
import { offer } from "./serving.js";
import { COLOURS, QUESTION, lamp } from "./watch_example.js";

const FRAME_MS = 1000;
const LONGEST_SIDE = 768;
const QUALITY = 0.85;
const MOST = 200;
const ENDS = {
  deleted: "Stopped.",
  idle: "Ended: no frame came for too long.",
  shutdown: "Ended: the server stops.",
  failed: "Ended: the question can’t be answered.",
};

/** {stream, controller, id, timer} of the watch that runs, if one does. */
let running = null;

/** Lets a watch be about one of `models`, as the server lists them. */
export function showWatch(models) {
  if (!$("watch-body").children.length) $("watch-body").replaceChildren(card(), happened());
  offer(
    $("watch-model"),
    models.map(({ id }) => id),
  );
}

function card() {
  const start = (what) => () => begin(what);
  return h(
    "section.card.watcher",
    h("header", h("h2", "Question"), h("p", { id: "watch-state", role: "status" }, "Not watching")),
    h("video", { id: "watch-picture", muted: true, playsinline: true, hidden: true, "aria-label": "What is watched" }),
    h(
      "form",
      { id: "watch-form", onsubmit: (event) => event.preventDefault() },
      h("label", "What should be watched for?", h("input", { id: "watch-question", required: true, maxlength: 500, placeholder: "Is the door open?" })),
      h("label", "Possible answers, with commas (optional; then it is known how sure they are)", h("input", { id: "watch-answers", placeholder: "open, closed" })),
      h("span.pick", { hidden: true }, h("select", { id: "watch-model", "aria-label": "Model of the watch" })),
      h(
        "p.row.wraps",
        { id: "watch-starts" },
        h("button.primary", { type: "button", onclick: start("camera") }, "Watch a camera"),
        h("button.quiet", { type: "button", onclick: start("screen") }, "Watch a screen"),
        h("button.quiet", { type: "button", onclick: start("example") }, "Watch an example"),
      ),
      h("button.quiet", { type: "button", id: "watch-stop", hidden: true, onclick: stop }, "Stop"),
    ),
    h("p.problem", { id: "watch-problem", role: "alert" }),
    h("p.muted.small", "One frame a second is sent to this server, and nowhere else. The model is asked when the picture changes."),
  );
}

const happened = () =>
  h(
    "section.card",
    h("header", h("h2", "Answers")),
    h("ol.rows", { id: "watch-events", "aria-live": "polite", "aria-label": "Changed answers, the last one first" }),
    h("div", { id: "watch-none" }, empty("No answer yet", "The first one, and each that differs, shows here.")),
  );

const say = (text) => $("watch-problem").replaceChildren(...inline(text));

async function begin(what) {
  say("");
  if (what === "example") fillExample();
  if (!$("watch-form").reportValidity()) return;
  let mine = null;
  try {
    const stream = await open(what);
    if (!stream) return;
    const controller = new AbortController();
    mine = running = { stream, controller, id: null, timer: null };
    stream.getVideoTracks()[0].addEventListener("ended", stop); // the browser's own "stop sharing"
    show(true);
    const response = await ask("v1/watch", { body: question(what), signal: controller.signal });
    for await (const event of events(response)) take(event, mine);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
  if (running === mine) end("");
}

function fillExample() {
  $("watch-question").value = QUESTION;
  $("watch-answers").value = Object.keys(COLOURS).join(", ");
}

/** The stream of a camera, of a screen or of the example; null, with a sentence shown, if there is none. */
async function open(what) {
  if (what === "example") return lamp();
  const { mediaDevices } = navigator;
  const problem = (text) => {
    say(text);
    return null;
  };
  if (!mediaDevices) return problem("Browsers allow cameras and screens only over https, or at 127.0.0.1.");
  if (what === "screen" && !mediaDevices.getDisplayMedia) return problem("This browser can’t share a screen.");
  try {
    const picture = { video: what === "camera" ? { facingMode: "environment" } : true };
    return await (what === "camera" ? mediaDevices.getUserMedia(picture) : mediaDevices.getDisplayMedia(picture));
  } catch (error) {
    if (error.name === "NotFoundError") return problem("There is no camera.");
    return problem(error.name === "NotAllowedError" ? `The ${what} may not be seen: allow it in the browser.` : error.message);
  }
}

function question(what) {
  const text = $("watch-question").value.trim();
  const answers = $("watch-answers").value.split(",").map((one) => one.trim()).filter(Boolean);
  const model = $("watch-model").value || undefined;
  if (!answers.length) return { model, question: text };
  const list_options = what !== "example"; // the embedded model knows that question as it stands
  return { model, questions: { watch: { instructions: text, criteria: answers, list_options } } };
}

function take(event, mine) {
  if (event.type === "started") {
    mine.id = event.watch_id;
    $("watch-state").textContent = `Watching with ${event.model}`;
    sendFrame(mine);
  } else if (event.type === "answer") {
    add(answer(event));
  } else if (event.type === "notice") {
    add(h("li", h("div", h("p", inline(event.message))), clock(new Date())));
  } else if (event.type === "end") {
    if (event.error) say(event.error.message);
    end(ENDS[event.reason] ?? "Ended.");
  }
}

function add(item) {
  $("watch-none").hidden = true;
  $("watch-events").prepend(item);
  while ($("watch-events").children.length > MOST) $("watch-events").lastChild.remove();
}

function answer({ frame, answer: told, probability, previous }) {
  const sure = told?.watch === undefined ? probability : probability.watch;
  const before = previous && worded(previous.answer);
  const share = sure === null ? "" : `${sure > 0.9995 ? "> 99.9" : (100 * sure).toFixed(1)} % sure`;
  return h(
    "li",
    h("div", h("p", before && [h("span.muted", before), " → "], h("b", worded(told))), h("p.muted.small", share)),
    clock(new Date(frame.time * 1000)),
  );
}

const worded = (told) => String(told?.watch ?? told);

/** Sends the frame that is seen now, and the next one a second later. */
async function sendFrame(mine) {
  const begun = performance.now();
  const blob = await picture().catch(() => null);
  if (running !== mine) return;
  if (blob) {
    try {
      await ask(`v1/watch/${mine.id}/frames`, { body: blob, signal: mine.controller.signal, quiet: true });
      if (running === mine) say("");
    } catch (error) {
      if (running !== mine) return;
      say(error.message);
    }
  }
  if (running === mine) mine.timer = setTimeout(sendFrame, Math.max(0, FRAME_MS - performance.now() + begun), mine);
}

async function picture() {
  const video = $("watch-picture");
  const scale = Math.min(1, LONGEST_SIDE / Math.max(video.videoWidth, video.videoHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(video.videoWidth * scale);
  canvas.height = Math.round(video.videoHeight * scale);
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
}

function show(isOn) {
  const video = $("watch-picture");
  video.hidden = !isOn;
  video.muted = true;
  video.srcObject = isOn ? running.stream : null;
  if (isOn) video.play().catch(() => null); // it is stopped before it has begun
  $("watch-starts").hidden = isOn;
  $("watch-stop").hidden = !isOn;
  for (const name of ["question", "answers", "model"]) $(`watch-${name}`).disabled = isOn;
  $("watch-state").textContent = isOn ? "Starting" : "Not watching";
}

function stop() {
  if (!running) return;
  if (running.id) ask(`v1/watch/${running.id}`, { method: "DELETE", quiet: true }).catch(() => null);
  end(ENDS.deleted);
}

function end(why) {
  const mine = running;
  if (!mine) return;
  running = null;
  clearTimeout(mine.timer);
  mine.controller.abort();
  for (const track of mine.stream.getTracks()) track.stop();
  show(false);
  $("watch-state").textContent = why || "Not watching";
}
