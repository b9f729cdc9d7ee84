// The page plays an episode over the same HTTP API as an agent, with the same two tools. Buttons only type a target: what they send is click(target).
// Every text from the shop is set with textContent, never as markup.

const $ = (id) => document.getElementById(id);
let episode = null; // {id, seq, busy, product}: product is the last product page's state, whose options stay clickable while they are being chosen

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function complain(message) {
  $("problem").textContent = message;
  $("problem").hidden = !message;
}

async function ask(method, path, body) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers["X-Privileged-Key"] = $("key").value;
  const response = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  const answer = await response.json();
  if (!response.ok) throw new Error(`${answer.error}: ${answer.message}`);
  return answer;
}

// Runs an action of the page; what goes wrong is shown, and the page stays usable.
async function guarded(action) {
  complain("");
  try {
    await action();
  } catch (error) {
    complain(error instanceof TypeError ? `The shop does not answer (${error.message}).` : error.message);
  }
}

// ------------------------------------------------------------------------------------------------------------ starting

async function listSplits() {
  const { splits } = await ask("GET", "/healthz");
  for (const [name, size] of Object.entries(splits)) $("split").append(new Option(`${name} (${size})`, name));
  await listTasks();
}

async function listTasks() {
  const { tasks } = await ask("GET", `/v1/tasks?split=${encodeURIComponent($("split").value)}`);
  $("task").replaceChildren(...tasks.map((task) => new Option(`${task.id}: ${task.instruction}`.slice(0, 90), task.id)));
}

async function start() {
  const privileged = Boolean($("key").value);
  const opened = await ask("POST", "/v1/episodes", { task_id: $("task").value, privileged });
  if (episode) ask("DELETE", `/v1/episodes/${episode.id}`).catch(() => {}); // one that is gone needs no closing
  episode = { id: opened.episode_id, seq: 0, busy: false, limit: opened.limits.max_actions, product: null };
  $("task-id").textContent = opened.task.id;
  $("instruction").textContent = opened.task.instruction;
  $("persona").replaceChildren(...facts(opened.task.persona));
  $("calls").replaceChildren();
  $("end").hidden = true;
  $("tools").hidden = false;
  $("episode").hidden = false;
  show(opened.observation, opened.state);
  $("query").focus();
}

function words(value) {
  if (Array.isArray(value)) return value.join(", ");
  return typeof value === "number" ? String(Number(value.toFixed(3))) : String(value);
}

// One line for each fact; nested ones follow a line that names what they belong to.
function facts(values, path = []) {
  const nested = (value) => value && typeof value === "object" && !Array.isArray(value);
  const entries = Object.entries(values);
  const plain = entries.filter(([, value]) => !nested(value));
  const title = path.length && plain.length ? [element("dt", path.join(" › "), "of")] : [];
  const lines = plain.flatMap(([name, value]) => [element("dt", name), element("dd", words(value))]);
  return [...title, ...lines, ...entries.filter(([, value]) => nested(value)).flatMap(([name, value]) => facts(value, [...path, name]))];
}

// ------------------------------------------------------------------------------------------------------------- playing

async function call(tool, argument) {
  if (!episode || episode.busy) return;
  episode.busy = true;
  try {
    const body = { seq: episode.seq + 1, tool, arguments: { [tool === "search" ? "query" : "target"]: argument } };
    const answer = await ask("POST", `/v1/episodes/${episode.id}/step`, body);
    episode.seq = answer.seq;
    record(tool, argument, answer);
    show(answer.observation, answer.state);
    if (answer.done) finish(answer);
  } finally {
    episode.busy = false;
  }
}

function record(tool, argument, answer) {
  const item = element("li");
  const details = element("details");
  const summary = element("summary");
  summary.append(element("code", `${tool}(${JSON.stringify(argument)})`), element("span", answer.feedback, answer.feedback === "ok" ? "ok" : "bad"));
  details.append(summary, element("pre", answer.observation));
  item.append(details);
  $("calls").append(item);
}

function show(observation, state) {
  $("observation").textContent = observation;
  $("steps").textContent = `call ${episode.seq} of ${episode.limit}`;
  if (state.page === "product") episode.product = state;
  else if (state.page !== "selection") episode.product = null;
  $("offers").replaceChildren(...offers(state));
}

function offer(target, text = target, className = "") {
  const button = element("button", text, className);
  button.type = "button";
  button.dataset.target = target;
  button.addEventListener("click", () => guarded(() => call("click", target)));
  return button;
}

function group(name, buttons) {
  const [row, targets] = [element("div", undefined, "group"), element("div")];
  targets.append(...buttons);
  row.append(element("span", name), targets);
  return row;
}

function offers(state) {
  const rows = (state.rows ?? []).map((row) => offer(row.label, row.label));
  const chosen = state.chosen ?? {};
  const axes = Object.entries(episode.product?.axes ?? {}).map(([axis, values]) =>
    group(axis, Object.keys(values).map((value) => offer(`${axis}=${value}`, value, chosen[axis] === value ? "chosen" : ""))),
  );
  const carried = state.page === "selection" ? episode.product.controls.filter((control) => control !== "buy now") : [];
  const controls = [...carried, ...(state.controls ?? [])].map((control) => offer(control, control, control === "buy now" ? "buy" : ""));
  return [...(rows.length ? [group("rows", rows)] : []), ...axes, ...(controls.length ? [group("controls", controls)] : [])];
}

// ------------------------------------------------------------------------------------------------------------- the end

const PARTS = [
  ["r_type", "kind of product"],
  ["r_att", "attributes"],
  ["r_opt", "options"],
  ["r_price", "price"],
  ["loose", "loose reward"],
  ["strict", "strict reward"],
];

function finish(answer) {
  const detail = answer.reward_detail;
  $("tools").hidden = true;
  $("end").hidden = false;
  $("outcome").textContent = `${answer.status.replace("_", " ")}: reward ${answer.reward.toFixed(3)}, ${answer.success ? "success" : "no success"}`;
  $("outcome").className = answer.success ? "ok" : "bad";
  const parts = PARTS.filter(([name]) => name in detail);
  $("reward").replaceChildren(
    ...parts.map(([name, meaning]) => {
      const row = element("tr");
      const meter = element("meter");
      meter.value = detail[name];
      const bar = element("td");
      bar.append(meter);
      row.append(element("th", name), element("td", meaning), element("td", detail[name].toFixed(3), "number"), bar);
      return row;
    }),
  );
  const shown = new Set([...parts.map(([name]) => name), "success"]);
  const rest = Object.fromEntries(Object.entries(detail).filter(([name]) => !shown.has(name)));
  $("detail").replaceChildren(...facts(rest));
  $("end").scrollIntoView({ block: "nearest" });
}

$("split").addEventListener("change", () => guarded(listTasks));
for (const [form, action] of [
  ["start", start],
  ["search", () => call("search", $("query").value)],
  ["click", () => call("click", $("target").value)],
]) {
  $(form).addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(action);
  });
}
guarded(listSplits);
