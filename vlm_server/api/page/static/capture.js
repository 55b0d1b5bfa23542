// A picture from a camera or of the screen.

import { picture } from "./attachments.js";
import { h } from "./dom.js";

const REASONS = {
  NotAllowedError: "The browser was not allowed to.",
  NotFoundError: "There is no camera.",
  NotReadableError: "Another program uses the camera.",
};

/** Runs the camera, and shows what it sees, until a picture is taken; null if none is. */
export async function camera() {
  const stream = await begin(() => navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 1920 }, facingMode: "environment" } }));
  const video = h("video", { autoplay: true, muted: true, playsinline: true, "aria-label": "What the camera sees" });
  video.srcObject = stream;
  const take = h("button", { type: "submit", class: "primary", disabled: true }, "Take picture");
  video.onplaying = () => {
    take.disabled = false;
    take.focus();
  };
  let file = null;
  const dialog = h(
    "dialog.camera",
    { "aria-label": "Camera" },
    h(
      "form",
      { onsubmit: async (event) => (event.preventDefault(), (file = await frame(video, "photograph.jpg", "image/jpeg")), dialog.close()) },
      video,
      h("div.row.end", h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"), take),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  await new Promise((resolve) => (dialog.onclose = resolve));
  for (const track of stream.getTracks()) track.stop();
  dialog.remove();
  return file;
}

/** A picture of a screen, a window or a tab, which the browser lets its user choose. */
export async function screen() {
  const stream = await begin(() => navigator.mediaDevices.getDisplayMedia({ video: true }), true);
  if (!stream) return null;
  try {
    const video = h("video", { autoplay: true, muted: true, playsinline: true });
    video.srcObject = stream;
    await video.play();
    await new Promise((resolve) => setTimeout(resolve, 250)); // the picker closes first
    return await frame(video, "screen.png", "image/png");
  } finally {
    for (const track of stream.getTracks()) track.stop();
  }
}

async function begin(ask, mayDecline = false) {
  try {
    return await ask();
  } catch (error) {
    if (mayDecline && error.name === "NotAllowedError") return null;
    throw new Error(`No picture could be taken. ${REASONS[error.name] ?? error.message}`);
  }
}

async function frame(video, name, type) {
  return new File([await picture(video, video.videoWidth, video.videoHeight, type)], name, { type });
}
