// Something to watch without a camera: a lamp that changes its colour. The embedded model can answer for it.

import { h } from "./dom.js";

export const QUESTION = "What colour is the circle?";
export const COLOURS = { red: "#d62728", blue: "#1f50c8", green: "#14963c" };

const [WIDTH, HEIGHT] = [640, 400];
const HOLD_MS = 5000;

/** The lamp as a stream, like that of a camera. It changes as long as the stream is used. */
export function lamp() {
  const canvas = h("canvas", { width: WIDTH, height: HEIGHT });
  const context = canvas.getContext("2d");
  const colours = Object.values(COLOURS);
  let number = 0;
  const change = () => draw(context, colours[number++ % colours.length]);
  change();
  const stream = canvas.captureStream(); // Firefox has none of a canvas without a context
  const [track] = stream.getVideoTracks();
  const timer = setInterval(() => (track.readyState === "ended" ? clearInterval(timer) : change()), HOLD_MS);
  return stream;
}

function draw(context, colour) {
  context.fillStyle = "#fff";
  context.fillRect(0, 0, WIDTH, HEIGHT);
  context.fillStyle = colour;
  context.beginPath();
  context.arc(WIDTH / 2, HEIGHT / 2, HEIGHT / 4, 0, 2 * Math.PI);
  context.fill();
}
