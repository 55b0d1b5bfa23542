// One answer on the screen: its text as it comes, thoughts folded away, tool calls, marks on the picture, figures.

import { canContinue } from "./conversation.js";
import { codeBlock } from "./code.js";
import { copy, count, h, iconButton, inline, pairs, percent, seconds } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { marked } from "./marked.js";
import { isJson } from "./markup.js";
import { findRegions } from "./regions.js";
import { asCurl, asPython } from "./snippets.js";
import { Waiting } from "./waiting.js";

const BUSY_SHARE = 8; // drawing takes at most an eighth of the time

export class AnswerView {
  /** `media` are those of the whole request, in order; `actions` what a reader can do: see thread.js. */
  constructor(answer, media, coordinates, actions) {
    Object.assign(this, { answer, media, coordinates, actions });
    this.heading = h("h2.hidden", "Answer");
    this.label = answer.label ? h("p.label", answer.label) : "";
    this.thinking = null;
    this.text = h("div.text");
    this.extras = h("div.extras");
    this.element = h("article.answer", { "aria-label": "Answer" }, this.heading, this.label, this.text, this.extras);
    if (answer.isOpen) this.begin();
    else this.end();
  }

  /** The answer is being written from here on. */
  begin() {
    this.element.setAttribute("aria-busy", "true");
    this.extras.replaceChildren();
    this.waiting?.end();
    this.waiting = new Waiting(this.media.length > 0, this.answer.model);
    this.element.append(this.waiting.element);
    this.drawNow();
  }

  /** Says what the answer waits for. */
  wait(told) {
    this.waiting ??= new Waiting(this.media.length > 0, this.answer.model);
    if (!this.waiting.element.isConnected) this.element.append(this.waiting.element);
    this.waiting.tell(told);
  }

  /** Something was written. */
  draw() {
    if (this.waiting && (this.answer.text || this.answer.thoughts || this.answer.calls.length)) {
      this.waiting.end();
      this.waiting = null;
    }
    if (this.isDue) return;
    this.isDue = true;
    setTimeout(() => requestAnimationFrame(() => this.isDue && this.drawNow()), this.pause ?? 0);
  }

  drawNow() {
    this.isDue = false;
    const start = performance.now();
    const { text, thoughts, calls, finish, isOpen } = this.answer;
    if (thoughts && !this.thinking) {
      this.thinking = h("details.thoughts", h("summary"), h("div"));
      this.text.before(this.thinking);
    }
    if (this.thinking) {
      this.thinking.lastChild.textContent = thoughts;
      this.thinking.firstChild.textContent = text || calls.length || finish || !isOpen ? "Thoughts" : "Thinking…";
    }
    if (this.answer.fields.response_format || (!isOpen && isJson(text))) this.text.replaceChildren(...(text ? [codeBlock(text, "json", !isOpen)] : []));
    else showMarkdown(this.text, text, !isOpen);
    this.pause = Math.min((performance.now() - start) * BUSY_SHARE, 1000);
  }

  /** The answer is over: shows all that needs to be whole. */
  end() {
    const { answer } = this;
    this.waiting?.end();
    this.waiting = null;
    this.drawNow();
    this.element.setAttribute("aria-busy", "false");
    this.extras.replaceChildren(
      ...answer.calls.map((call) => callElement(call, this.actions.changed)),
      ...this.figures(),
      ...this.notes(),
      this.footer(),
    );
  }

  notes() {
    const { text, calls, stopped, error, finish } = this.answer;
    if (error) return [this.problem(error)];
    if (stopped) return [note("Stopped.")];
    if (finish === "length")
      return [note("Cut off at the longest answer allowed. Continue it, or raise the limit in the options.")];
    return text || calls.length ? [] : [note("The model answered nothing.")];
  }

  problem({ message, code, isRefused }) {
    const mayPass = code !== "context_length_exceeded"; // the same question is as long again
    const retry = mayPass && h("button", { type: "button", class: "link retry", onclick: this.actions.retry }, "Try again");
    const left = isRefused && " Edit the question, or ask another one: this one is then left out.";
    return h("div.error", { role: "alert" }, h("p", inline(message), ADVICE[code] && ` ${ADVICE[code]}`, left), retry);
  }

  /** The picture with what the answer points at, if it does. */
  figures() {
    const { text, calls, usage } = this.answer;
    const images = this.media.filter(({ kind }) => kind === "image");
    const picture = images.at(-1);
    if (!picture) return [];
    const seen = usage?.images?.at(-1);
    const texts = [text, ...calls.map((call) => call.arguments)];
    const regions = texts.flatMap((one) => findRegions(one, seen, this.coordinates));
    return regions.length ? [marked(picture, regions)] : [];
  }

  footer() {
    const { answer, actions } = this;
    const copied = (image, name, make) => iconButton(image, name, async ({ currentTarget }) => copy(currentTarget, await make()));
    const names = this.media.map(({ name }) => name);
    const figures = pairs("figures", this.measured());
    const details = iconButton("info", "Details", () => details.setAttribute("aria-expanded", String(figures.classList.toggle("explained"))), "What the figures mean");
    details.setAttribute("aria-expanded", "false");
    return h(
      "footer",
      figures,
      h(
        "p.copies",
        actions.choose && h("button.link", { type: "button", onclick: actions.choose }, "Go on with this one"),
        canContinue(answer) && named("continue", "Continue", actions.goOn, "Continue where it ended"),
        actions.again && !answer.error && named("again", "Again", actions.again, "Again: ask for another answer"),
        answer.text && copied("copy", "Copy", () => answer.text),
        copied("shell", "Copy as curl", () => asCurl(actions.body(), names)),
        copied("code", "Copy as Python", () => asPython(actions.body(), names)),
        figures.querySelector(".why") && details,
      ),
    );
  }

  measured() {
    const { answer } = this;
    const shown = answer.model && answer.model !== "default" && !answer.label ? [["Model", answer.model]] : [];
    if (answer.first !== null)
      shown.push(["First token", seconds(answer.first), "From sending the question to the first token"]);
    const { usage } = answer;
    if (!usage) return shown;
    const tokens = usage.completion_tokens;
    const isSteady = answer.news > 1 && !answer.isPieced && !answer.calls.length; // a call comes when it is complete
    if (isSteady && answer.spent > 0.02)
      shown.push([
        "Speed",
        `${count((tokens - 1) / answer.spent)} tokens/s`,
        `${count(tokens - 1)} tokens in ${seconds(answer.spent)} after the first`,
      ]);
    const cached = usage.prompt_tokens_details.cached_tokens;
    shown.push([
      "From cache",
      `${count(cached)} of ${count(usage.prompt_tokens)} tokens`,
      `${percent(cached, usage.prompt_tokens)} of the prompt had been read before`,
    ]);
    const images = this.actions.hasMedia ? (usage.images ?? []) : []; // those of earlier questions were told there
    if (images.length) shown.push(["Seen as", sizes(images), costOf(images)]);
    return shown;
  }
}

/** An icon that shows its name where no mouse can rest on it. */
function named(...button) {
  const element = iconButton(...button);
  element.classList.add("named");
  return element;
}

/** What a person can do about an error, where the message does not say it. */
const ADVICE = {
  out_of_memory: "Fewer or smaller pictures, or a shorter answer, need less.",
  queue_timeout: "Other requests took too long. Later it may be quicker.",
  forbidden: "Ask whoever runs this server.",
};

/** The sizes of the pictures; of many, those of the first two. */
function sizes(images) {
  const all = [...new Set(images.map(({ width, height }) => `${width} × ${height}`))];
  return all.slice(0, 2).join(", ") + (all.length > 2 ? ` and ${all.length - 2} more` : "");
}

/** What the pictures cost, with their sizes where there are several. */
const costOf = (images) =>
  images.length === 1
    ? `The size at which the model saw the picture: ${count(images[0].tokens)} tokens`
    : images.map(({ width, height, tokens }, index) => `Picture ${index + 1}: ${width} × ${height}, ${count(tokens)} tokens`).join("\n");

const note = (text) => h("p.note", text);

/** A call, and a field for what is told of its result. */
function callElement(call, changed) {
  const result = h("input", {
    placeholder: "Sent with your next question",
    "aria-label": `Result of ${call.name}`,
    oninput: () => {
      call.result = result.value;
      changed();
    },
  });
  result.value = call.result;
  return h(
    "div.call",
    h("p", h("span.kind", "Tool call"), h("code", call.name)),
    h("pre", { tabindex: "0", "aria-label": `Arguments of ${call.name}` }, h("code", pretty(call.arguments))),
    h("label", "Result", result),
  );
}

function pretty(json) {
  try {
    const value = JSON.parse(json);
    const line = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
    return line.length < 60 ? line : JSON.stringify(value, null, 2);
  } catch {
    return json;
  }
}
