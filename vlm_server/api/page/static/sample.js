// A picture to begin with, and questions that the embedded model can answer.

import { $, h } from "./dom.js";

const PICTURE = new URL("./sample.png", import.meta.url).pathname;
const QUESTIONS = ["Describe the picture.", "How many blue squares are there?", "Where is the circle?", "What colour is the star?"];

/** Offers the picture; `ask(file, text)` is called with what is chosen. */
export function offerSample(ask) {
  const begin = async (text) => {
    const blob = await (await fetch(PICTURE)).blob();
    ask(new File([blob], "sample.png", { type: "image/png" }), text);
  };
  $("sample").append(
    h("img", { src: PICTURE, alt: "A drawing of a purple star, a red circle and two blue squares", width: 640, height: 400, loading: "lazy" }),
    h(
      "div",
      h("p", "No picture at hand? Ask about this one."),
      h("ul.chips", { "aria-label": "Questions about the sample" }, QUESTIONS.map((text) => h("li", h("button", { type: "button", onclick: () => begin(text) }, text)))),
    ),
  );
}
