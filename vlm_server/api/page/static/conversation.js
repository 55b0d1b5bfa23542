// A conversation as data, and the request that it makes.
//
// {id, title, created, updated, turns}; a turn is {text, media, answers, shown, isCompared}; a medium is
// {id, name, kind, type, bytes, width, height, pages}, and as long as it is shown has its `blob` and `url`.
// An answer is {model, label, system, fields, detail, text, thoughts, calls, usage, finish, isOpen, stopped, error,
// resume, first, spent, news, isPieced, continued}: all to show it again, to go on from it, and to resume it.

import { dataUrl, newId } from "./attachments.js";

export const newConversation = () => ({ id: newId(), title: "", created: Date.now(), updated: Date.now(), turns: [] });

export const newTurn = (text, media) => ({ text, media, answers: [], shown: 0, isCompared: false });

export const newAnswer = (asked) => ({ ...asked, ...EMPTY, calls: [], isOpen: true });

const EMPTY = {
  text: "", thoughts: "", usage: null, finish: null, stopped: false, error: null, resume: null, first: null, spent: 0, news: 0,
};

export const titleOf = (turn) => turn.text.replace(/\s+/g, " ").slice(0, 80);

export const shownAnswer = (turn) => turn.answers[turn.shown];

/** Adds what an event of the stream tells to an answer. */
export function add(answer, event) {
  if (event.usage) answer.usage = joined(answer.continued, event.usage);
  const choice = event.choices[0];
  if (!choice) return;
  const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
  answer.text += content ?? "";
  answer.thoughts += thought ?? "";
  for (const { index, id, function: { name, arguments: more } } of calls ?? []) {
    const call = (answer.calls[index] ??= { id, name, arguments: "", result: "" });
    call.arguments += more ?? "";
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

/** The usage of an answer that was written in two requests. */
function joined(before, usage) {
  if (!before) return usage;
  const written = before.completion_tokens + usage.completion_tokens;
  return { ...usage, completion_tokens: written };
}

/** Whether the model can go on where an answer ended. */
export const canContinue = (answer) =>
  Boolean(answer.text) && !answer.calls.length && !answer.fields.response_format && !answer.isOpen &&
  (answer.stopped || Boolean(answer.error) || answer.finish === "length");

/** The turns that the model is told of: the last one, and those before it that were not refused. */
const told = (turns) =>
  turns.filter((turn) => turn === turns.at(-1) || !shownAnswer(turn)?.error?.isRefused || messagesOf(shownAnswer(turn)).length);

/**
 * The body that asks for `answer` to `turns`, the last of which is the question. `urlOf` gives the URL of a medium.
 * An answer that has text is continued.
 */
export function requestBody(answer, turns, urlOf) {
  const messages = answer.system ? [{ role: "system", content: answer.system }] : [];
  for (const turn of told(turns)) {
    const isLast = turn === turns.at(-1);
    const media = turn.media.map((one) => part(one, urlOf(one), answer.detail));
    const text = turn.text || !media.length ? [{ type: "text", text: turn.text }] : [];
    messages.push({ role: "user", content: [...media, ...text] });
    messages.push(...messagesOf(isLast ? answer : shownAnswer(turn)));
  }
  const isContinued = Boolean(answer.text);
  return {
    model: answer.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    ...answer.fields,
    ...(isContinued ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}

/** The messages that stand for an answer; none if there is nothing to go on from. */
function messagesOf(answer) {
  if (!answer || (!answer.text && !answer.calls.length)) return [];
  const message = { role: "assistant", content: answer.text || null };
  if (answer.thoughts) message.reasoning_content = answer.thoughts;
  if (!answer.calls.length) return [message];
  message.tool_calls = answer.calls.map(({ id, name, arguments: args }) => ({
    id,
    type: "function",
    function: { name, arguments: args },
  }));
  return [message, ...answer.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }))];
}

/** The part of a message that stands for a medium. */
function part({ name, kind, pages }, url, detail) {
  if (kind === "document")
    return { type: "file", file: { filename: name, file_data: url, ...(pages ? { pages } : {}) } };
  if (kind === "video") return { type: "video_url", video_url: { url } };
  return { type: "image_url", image_url: { url, ...(detail ? { detail } : {}) } };
}

/** The whole body, with all media in it. */
export async function fullBody(answer, turns) {
  const urls = new Map();
  for (const turn of told(turns)) for (const one of turn.media) urls.set(one, await dataUrl(one));
  return requestBody(answer, turns, (one) => urls.get(one));
}
