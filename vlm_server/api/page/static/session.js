// The conversation that is open: what is asked in it, what runs for it, and when it is kept.

import { withUrl } from "./attachments.js";
import { add, canContinue, fullBody, newAnswer, newConversation, newTurn, shownAnswer, titleOf } from "./conversation.js";
import { $ } from "./dom.js";
import { loadMarkdown } from "./markdown.js";
import { asked, modelNamed } from "./options.js";
import * as store from "./store.js";
import { Interrupted, stream, untilReady } from "./stream.js";
import { TurnView } from "./thread.js";

const CURRENT = "vlm_server conversation";
const KEEP_MS = 1000;
const RESUMABLE_MS = 60_000;

let conversation = newConversation();
const views = new Map(); // of the turns on the screen
const runs = new Map(); // by conversation id: {conversation, controller}, also of those that are not open
const storedFiles = new Set();
const timers = new Map();
let troubled = () => {};

export const numTurns = () => conversation.turns.length;
export const media = () => conversation.turns.flatMap((turn) => turn.media);
export const openId = () => conversation.id;
export const isRunning = (id = conversation.id) => runs.has(id);
export const stop = () => runs.get(conversation.id)?.controller.abort();
export const lastQuestions = () => conversation.turns.map((turn) => turn.text).filter(Boolean).reverse();

/** `trouble(text)` is told why conversations are not kept; "" once they are. */
export const onTrouble = (trouble) => (troubled = trouble);

const news = (name) => dispatchEvent(new Event(name));

/** Asks a question: once, or for each of `ways` if there are several. */
export function submit(text, media, ways) {
  const turn = newTurn(text, media);
  turn.answers = ways.map(newAnswer);
  turn.isCompared = ways.length > 1;
  conversation.turns.push(turn);
  conversation.title ||= titleOf(turn) || media[0].name;
  show(turn);
  run(conversation, turn, turn.answers);
}

const acts = {
  turnsUpTo: (turn) => conversation.turns.slice(0, conversation.turns.indexOf(turn) + 1),
  numLater: (turn) => conversation.turns.length - 1 - conversation.turns.indexOf(turn),
  coordinates: (answer) => modelNamed(answer.model)?.coordinates,
  isBusy: () => isRunning(),
  changed: () => keepSoon(conversation),
  again(turn) {
    const way = !isRunning() && asked();
    if (!way) return;
    cutAfter(turn);
    turn.answers.push(newAnswer(way));
    turn.shown = turn.answers.length - 1;
    views.get(turn).showAnswers();
    run(conversation, turn, [shownAnswer(turn)]);
  },
  show(turn, index) {
    turn.shown = index;
    views.get(turn).showAnswers();
    keepSoon(conversation);
  },
  choose(turn, index) {
    turn.shown = index;
    turn.isCompared = false;
    views.get(turn).views.clear();
    views.get(turn).showAnswers();
    keepSoon(conversation);
    $("question").focus();
  },
  edit(turn, text) {
    const way = !isRunning() && asked();
    if (!way) return;
    cutAfter(turn);
    Object.assign(turn, { text, answers: [newAnswer(way)], shown: 0, isCompared: false });
    if (conversation.turns[0] === turn) conversation.title = titleOf(turn) || conversation.title;
    show(turn);
    run(conversation, turn, turn.answers);
  },
  goOn: (turn, answer) => isRunning() || runAgain(turn, answer),
  retry(turn, answer) {
    const way = !isRunning() && (canContinue(answer) ? {} : asked());
    if (way) runAgain(turn, Object.assign(answer, way));
  },
};

function runAgain(turn, answer) {
  const isMore = canContinue(answer);
  Object.assign(answer, isMore ? { continued: answer.usage, isPieced: true } : { ...newAnswer(answer), continued: null, isPieced: false });
  Object.assign(answer, { isOpen: true, stopped: false, error: null, finish: null, resume: null });
  run(conversation, turn, [answer]);
}

/** Removes the turns after `turn`: what they answered is no longer so. */
function cutAfter(turn) {
  for (const late of conversation.turns.splice(conversation.turns.indexOf(turn) + 1)) {
    views.get(late)?.element.remove();
    views.delete(late);
  }
}

// ---- answers ------------------------------------------------------------------------------

async function run(of, turn, answers) {
  const controller = new AbortController();
  runs.set(of.id, { conversation: of, controller });
  loadMarkdown();
  of.updated = Date.now();
  news("run");
  keepSoon(of, 0);
  await Promise.all(answers.map((answer) => write(of, turn, answer, controller.signal)));
  runs.delete(of.id);
  of.updated = Date.now();
  keepSoon(of, 0);
  news("run");
}

/** The view of an answer, if it is on the screen. */
const viewOf = (turn, answer) => views.get(turn)?.view(answer);

async function write(of, turn, answer, signal) {
  const clock = new Clock(answer);
  answer.isPieced ||= Boolean(answer.resume);
  const tell = (told) => viewOf(turn, answer)?.wait(told);
  const take = (event) => {
    const before = answer.text.length + answer.thoughts.length + answer.calls.length;
    add(answer, event);
    if (before !== answer.text.length + answer.thoughts.length + answer.calls.length) clock.news();
    viewOf(turn, answer)?.draw();
    news("written");
    keepSoon(of);
  };
  const note = (id) => {
    if (!answer.resume) keepSoon(of, 0); // from here on it outlives the page
    answer.resume = id;
  };
  viewOf(turn, answer)?.begin();
  try {
    for (let isOver = false; !isOver; ) {
      try {
        const body = answer.resume ? null : await fullBody(answer, of.turns.slice(0, of.turns.indexOf(turn) + 1));
        await stream({ body, signal, take, note, tell, from: answer.resume });
        isOver = true;
      } catch (error) {
        if (!(error instanceof Interrupted)) throw error;
        goOnFrom(answer);
        await untilReady(signal, tell);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") answer.stopped = true;
    else answer.error = { message: error.message, code: error.code ?? "", isRefused: REFUSALS.includes(error.status) };
    if (answer.error) news("trouble"); // whoever shows the server's state looks again
  }
  answer.isOpen = false;
  answer.resume = null;
  viewOf(turn, answer)?.end();
  news("written");
}

/** What an engine wrote before it died stays if the next one can go on from it. */
function goOnFrom(answer) {
  answer.resume = null;
  answer.isPieced = true;
  if (answer.text && !answer.calls.length && !answer.fields.response_format) return;
  Object.assign(answer, { text: "", thoughts: "", calls: [] });
}

class Clock {
  constructor(answer) {
    this.answer = answer;
    this.started = performance.now();
    this.spentBefore = answer.spent;
    this.first = null;
  }

  news() {
    const { answer } = this;
    const now = performance.now();
    this.first ??= now;
    answer.first ??= (now - this.started) / 1000;
    answer.spent = this.spentBefore + (now - this.first) / 1000;
    answer.news++;
  }
}

// ---- keeping and opening --------------------------------------------------------------------

/** Keeps a conversation once the pause is over. */
function keepSoon(of, pause = KEEP_MS) {
  if (!of.turns.length || (pause && timers.has(of.id))) return;
  clearTimeout(timers.get(of.id));
  timers.set(
    of.id,
    setTimeout(() => {
      timers.delete(of.id);
      keep(of);
    }, pause),
  );
}

async function keep(of) {
  if (runs.has(of.id)) of.updated = Date.now();
  try {
    await store.keep(of, (medium) => !storedFiles.has(medium.id));
    for (const turn of of.turns) for (const { id } of turn.media) storedFiles.add(id);
    if (of === conversation) sessionStorage.setItem(CURRENT, of.id);
    troubled("");
  } catch (error) {
    troubled(error.message);
  }
  news("kept");
}

addEventListener("pagehide", () => {
  for (const { conversation: of } of runs.values()) keep(of);
});

function show(turn) {
  const view = new TurnView(turn, acts);
  const old = views.get(turn);
  old ? old.element.replaceWith(view.element) : $("thread").append(view.element);
  views.set(turn, view);
}

function showAll(of) {
  for (const turn of conversation.turns)
    if (!isRunning(conversation.id)) for (const one of turn.media) URL.revokeObjectURL(one.url);
  conversation = of;
  views.clear();
  $("thread").replaceChildren();
  for (const turn of of.turns) show(turn);
  news("opened");
}

export function startAnew() {
  sessionStorage.removeItem(CURRENT);
  showAll(newConversation());
}

/** Opens a conversation that is kept; returns whether it was there. */
export async function open(id) {
  if (id === conversation.id) return true;
  const running = runs.get(id);
  const found = running ? running.conversation : await store.load(id);
  if (!found) return false;
  if (!running) await withContent(found);
  await loadMarkdown();
  sessionStorage.setItem(CURRENT, id);
  showAll(found);
  if (!running) resume(found);
  return true;
}

async function withContent(found) {
  const contents = await store.files(found.id);
  for (const turn of found.turns)
    for (const one of turn.media) {
      Object.assign(one, withUrl(contents.get(one.id) ?? new Blob([])));
      storedFiles.add(one.id);
    }
}

/** Goes on with answers that were being written when the page was closed. */
function resume(found) {
  const turn = found.turns.at(-1);
  const left = turn?.answers.filter((answer) => answer.isOpen) ?? [];
  if (!left.length) return;
  if (Date.now() - found.updated < RESUMABLE_MS) return run(found, turn, left);
  for (const answer of left) {
    Object.assign(answer, { isOpen: false, resume: null, error: CLOSED });
    viewOf(turn, answer)?.end();
  }
}

const REFUSALS = [400, 413, 415, 422]; // of what was asked, so that asking again is in vain
const CLOSED = { message: "The page was closed while this was written.", code: "closed" };

/** Opens what this tab had open before it was loaded again. */
export async function reopen() {
  const id = sessionStorage.getItem(CURRENT);
  if (id) await open(id).catch(() => false);
}

export async function forget(id) {
  runs.get(id)?.controller.abort();
  clearTimeout(timers.get(id));
  timers.delete(id);
  await store.forget(id);
  if (id === conversation.id) startAnew();
}

export async function rename(id, title) {
  if (id === conversation.id) conversation.title = title;
  await store.rename(id, title);
}
