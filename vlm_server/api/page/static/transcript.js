// Conversations as files: JSON with all that is kept, and Markdown to read. Loaded when somebody exports.

import { dataUrl } from "./attachments.js";
import { save } from "./dom.js";
import * as store from "./store.js";

/** Saves conversations with these ids as one file of JSON, their pictures as data URLs. */
export async function saveJson(ids) {
  const list = [];
  for (const id of ids) {
    const { turns, ...kept } = await store.load(id);
    const files = await store.files(id);
    const withContent = async (one) => ({ ...one, url: files.has(one.id) ? await dataUrl({ blob: files.get(one.id) }) : null });
    list.push({ ...kept, turns: await Promise.all(turns.map(async (turn) => ({ ...turn, media: await Promise.all(turn.media.map(withContent)) }))) });
  }
  const text = JSON.stringify({ format: "vlm_server conversations", version: 1, conversations: list }, null, 1);
  save(`${fileName(list)}.json`, new Blob([text], { type: "application/json" }));
}

export async function saveMarkdown(id) {
  const kept = await store.load(id);
  const parts = [`# ${kept.title}`];
  for (const { text, media, answers, shown, isCompared } of kept.turns) {
    parts.push(`## Question\n\n${[...media.map(({ name, pages }) => `*${name}${pages ? `, pages ${pages}` : ""}*`), text].filter(Boolean).join("\n\n")}`);
    for (const answer of isCompared ? answers : [answers[shown]].filter(Boolean)) parts.push(answerText(answer));
  }
  save(`${fileName([kept])}.md`, new Blob([`${parts.join("\n\n")}\n`], { type: "text/markdown" }));
}

function answerText({ label, model, text, thoughts, calls, error, stopped }) {
  const name = label || (model === "default" ? "" : model);
  const quoted = thoughts && `> ${thoughts.trim().replaceAll("\n", "\n> ")}`;
  const called = calls.map((call) => `\`\`\`json\n${call.name} ${call.arguments}\n\`\`\`${call.result ? `\n\nResult: ${call.result}` : ""}`);
  const end = error ? `*${error.message}*` : stopped ? "*Stopped.*" : "";
  return [`## Answer${name ? ` (${name})` : ""}`, quoted, text, ...called, end].filter(Boolean).join("\n\n");
}

const fileName = (list) =>
  list.length === 1 ? list[0].title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation" : "conversations";
