// How other programs use this server: its addresses, and what to run or to enter for each program.

import { hasKey } from "./api.js";
import { codeBlock } from "./code.js";
import { $, copy, h } from "./dom.js";

/** Programs whose settings `vlm-server connect` writes. */
export const WRITTEN = {
  "claude-code": "Claude Code",
  codex: "Codex",
  continue: "Continue",
  opencode: "OpenCode",
  zed: "Zed",
};
/** Programs that keep their settings themselves: where to enter the address, and whether it is OpenAI's API. */
export const ENTERED = {
  "open-webui": ["Open WebUI", "Admin Settings, Connections, OpenAI", true],
  cline: ["Cline", "API Provider: OpenAI Compatible", true],
  "home-assistant": ["Home Assistant", "Settings, Devices & services, Add integration, Ollama", false],
};
const USUAL_PORT = "8000";
const LOOPBACK = ["127.0.0.1", "localhost", "[::1]"];

/** `models` are what `/v1/models` says of them; none if they are not known yet. */
export function showConnect(models) {
  const names = models.map(({ id }) => id);
  const known = JSON.stringify([names, hasKey()]);
  if ($("connect-body").dataset.known === known) return; // a button that was pressed says so
  $("connect-body").dataset.known = known;
  const root = (location.origin + new URL(".", document.baseURI).pathname).replace(/\/$/, ""); // without a user's name
  const isHere = LOOPBACK.includes(location.hostname);
  const address = isHere && location.port === USUAL_PORT ? "" : ` --url ${root}/v1`;
  $("connect-body").replaceChildren(
    card(
      "This server",
      "What programs ask for",
      [
        row("Base URL", `${root}/v1`, "OpenAI’s API, which most programs speak"),
        row("Without /v1", root, "Anthropic’s and Ollama’s APIs"),
        ...names.map((name) => row("Model", name)),
        names.length && keyRow(),
      ],
      isHere && "This address is for programs on this machine. For others, set server.host and API keys, and use this machine’s own address.",
    ),
    card(
      "By one command",
      "In a terminal where the program runs",
      Object.entries(WRITTEN).map(([name, title]) => row(title, `vlm-server connect ${name}${address}`)),
      "It shows the change of the program’s settings and asks before it writes; --undo takes the change back. In a clone that was not installed, the command is .venv/bin/vlm-server.",
    ),
    card(
      "By hand",
      "In the program’s own settings",
      Object.values(ENTERED).map(([title, where, isOpenAi]) => row(title, isOpenAi ? `${root}/v1` : root, where)),
    ),
    h("section.card", h("header", h("h2", "In your own programs"), h("p", "OpenAI’s libraries read these")), codeBlock(variables(root), "bash", true)),
  );
}

const card = (title, about, rows, more) =>
  h("section.card", h("header", h("h2", title), h("p", about)), h("ul.rows", rows.filter(Boolean)), more && h("p.muted.small", more));

/** Something to copy, and what it is. */
function row(label, value, about) {
  const button = h("button", { class: "quiet small", "aria-label": `Copy ${label}: ${value}`, onclick: () => copy(button, value) }, "Copy");
  return h("li", h("div", h("b", label), h("code", value.split(" ").flatMap((word) => [h("span.word", word), " "])), about && h("p.muted.small", about)), button);
}

/** Whether a key is needed is known once a request was answered; a key itself is never shown. */
const keyRow = () =>
  hasKey()
    ? h("li", h("div", h("b", "API key"), h("p.muted.small", "Needed: the one that you gave this page, or another one of this server. On the server’s machine, the commands below take the first key of its settings. Elsewhere, and for a server in a container, add --api-key-file FILE.")))
    : row("API key", "none", "No key is needed. This is for programs that insist on one.");

const variables = (root) => `export OPENAI_BASE_URL=${root}/v1
export OPENAI_API_KEY=${hasKey() ? '"$VLM_SERVER_API_KEY"' : "none"}`;
