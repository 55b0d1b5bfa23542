// A turn on the screen: the question, which can be edited, and its answers, one at a time or side by side.

import { AnswerView } from "./answer.js";
import { preview } from "./attachments.js";
import { requestBody } from "./conversation.js";
import { copy, h, icon, iconButton } from "./dom.js";
import { enlarge } from "./marked.js";

/**
 * `acts` are what the conversation does: {turnsUpTo(turn), again(turn), goOn(turn, answer), retry(turn, answer),
 * show(turn, index), edit(turn, text), changed(), coordinates(answer), isBusy()}.
 */
export class TurnView {
  constructor(turn, acts) {
    Object.assign(this, { turn, acts });
    this.views = new Map();
    this.asked = h("article.asked", { "aria-label": "Question" });
    this.answers = h("div.answers");
    this.element = h("section.turn", this.asked, this.answers);
    this.showQuestion();
    this.showAnswers();
  }

  showQuestion() {
    const { text, media } = this.turn;
    this.asked.replaceChildren(
      h("h2.hidden", "Question"),
      ...(media.length ? [h("div", { class: media.length > 1 ? "media several" : "media" }, media.map(shown))] : []),
      ...(text ? [h("p.said", text)] : []),
      h(
        "p.copies.asides",
        iconButton("edit", "Edit", () => this.edit()),
        text && iconButton("copy", "Copy", ({ currentTarget }) => copy(currentTarget, text)),
      ),
    );
  }

  /** Puts a field in place of the question. */
  edit() {
    if (this.acts.isBusy()) return;
    const field = h("textarea", { "aria-label": "Edit the question", rows: Math.min(this.turn.text.split("\n").length + 1, 10) });
    field.value = this.turn.text;
    const end = () => this.showQuestion();
    const later = this.acts.numLater(this.turn);
    const form = h(
      "form.edit",
      {
        onsubmit: (event) => {
          event.preventDefault();
          if (field.value.trim() || this.turn.media.length) this.acts.edit(this.turn, field.value.trim());
        },
        onkeydown: (event) => {
          if (event.key === "Escape") {
            event.stopPropagation();
            end();
            this.asked.querySelector(".act")?.focus();
          } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            form.requestSubmit();
          }
        },
      },
      field,
      later ? h("p.note", `${later === 1 ? "The turn" : `The ${later} turns`} after it will be removed.`) : null,
      h("p.row.end", h("button", { type: "button", class: "quiet", onclick: end }, "Cancel"), h("button.primary", "Ask again")),
    );
    const said = this.asked.querySelector(".said");
    this.asked.querySelector(".asides").remove();
    said ? said.replaceWith(form) : this.asked.append(form);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  /** The view of an answer, which is drawn once. */
  view(answer) {
    if (!this.views.has(answer)) {
      const { turn, acts } = this;
      const media = acts.turnsUpTo(turn).flatMap((one) => one.media);
      const index = () => turn.answers.indexOf(answer);
      const isPair = turn.isCompared;
      this.views.set(
        answer,
        new AnswerView(answer, media, acts.coordinates(answer), {
          again: isPair ? null : () => acts.again(turn),
          choose: isPair ? () => acts.choose(turn, index()) : null,
          goOn: () => acts.goOn(turn, answer),
          retry: () => acts.retry(turn, answer),
          changed: () => acts.changed(),
          hasMedia: turn.media.length > 0,
          body: () => requestBody({ ...answer, text: "" }, acts.turnsUpTo(turn), ({ type }) => `data:${type};base64,`),
        }),
      );
    }
    return this.views.get(answer);
  }

  showAnswers() {
    const { turn } = this;
    const { answers, isCompared } = turn;
    this.element.classList.toggle("compared", isCompared);
    const list = isCompared ? answers : answers.slice(turn.shown, turn.shown + 1);
    const views = list.map((answer) => this.view(answer));
    views.forEach((view, index) => view.element.classList.toggle("chosen", isCompared && index === turn.shown));
    this.answers.replaceChildren(...views.map((view) => view.element), ...this.versions());
  }

  /** Steps through the answers, if there are several. */
  versions() {
    const { answers, shown, isCompared } = this.turn;
    if (answers.length < 2 || isCompared) return [];
    const step = (label, by, name) =>
      h(
        "button",
        { type: "button", class: "icon", "aria-label": label, title: label, disabled: !answers[shown + by], onclick: () => this.acts.show(this.turn, shown + by) },
        icon(name),
      );
    return [
      h(
        "p.versions",
        step("Answer before", -1, "back"),
        h("span", { "aria-live": "polite" }, `${shown + 1} of ${answers.length}`),
        step("Next answer", 1, "forth"),
      ),
    ];
  }
}

/** A medium of a question: pictures can be enlarged, and clips played. */
function shown(one) {
  if (one.kind === "image")
    return h(
      "button",
      { type: "button", class: "zoom", "aria-label": `Enlarge ${one.name}`, onclick: () => enlarge(one) },
      h("img", { src: one.url, alt: one.name, width: one.width, height: one.height }),
    );
  if (one.kind === "document") return preview(one);
  return h(
    "div.clip",
    h("video", { src: one.url, muted: true, playsinline: true, controls: true, "aria-label": one.name }),
    preview(one),
  );
}
