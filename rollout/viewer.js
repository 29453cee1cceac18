"use strict";
(() => {
  const run = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const STEP_X = 40, STEP_Y = 24, LEFT = 26, TOP = 24;
  const MARKS = { good: "\u2713", bad: "\u2717", none: "\u25cb", infra: "\u25c6" };
  const WORDS = { good: "success", bad: "failure", none: "unscored", infra: "failed attempt" };
  const HEAT_AT = 4; // a log-prob of -4 or less has the full colour

  /* ---- elements: all text goes in by textContent, so nothing in the data can become markup ---- */

  function el(tag, attributes = {}, ...children) {
    const found = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") found.className = value;
      else if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
      else found.setAttribute(key, value);
    }
    found.append(...children.filter((child) => child !== null && child !== undefined));
    return found;
  }

  function svg(tag, attributes = {}) {
    const found = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    return found;
  }

  const number = (value) => Number(value).toLocaleString("en-US");
  const share = (value) => (value === null || value === undefined ? "\u2013" : `${(100 * value).toFixed(1)} %`);
  const short = (value) => String(+Number(value).toPrecision(4));

  /* ---- what the journal says, made ready ---- */

  function outcome(node) {
    if (node.status === "failed") return "infra";
    if (node.success === true) return "good";
    return node.success === false ? "bad" : "none";
  }

  function prepare(tree) {
    tree.counts = { good: 0, bad: 0, none: 0, infra: 0 };
    tree.nodes.forEach((node, index) => {
      Object.assign(node, { index, children: [], below: { good: 0, bad: 0, none: 0 }, depth: 0 });
      if (node.parent !== null) {
        tree.nodes[node.parent].children.push(node);
        node.depth = tree.nodes[node.parent].depth + 1;
      }
      if (node.status === "leaf") node.below[outcome(node)] = 1;
      if (node.status === "leaf" || node.status === "failed") tree.counts[outcome(node)] += 1;
    });
    for (let i = tree.nodes.length - 1; i > 0; i -= 1) {
      const node = tree.nodes[i];
      for (const key of ["good", "bad", "none"]) tree.nodes[node.parent].below[key] += node.below[key];
    }
    tree.mixed = tree.counts.good > 0 && tree.counts.bad > 0;
  }

  /* Leaves get one row each, from top to bottom; an inner node stands in the row of the turn that goes on from it. */
  function layOut(tree) {
    if (tree.height) return;
    let row = 0;
    const ends = [];
    for (const node of tree.nodes) {
      node.x = LEFT + STEP_X * node.depth;
      if (!node.children.length) {
        node.y = TOP + STEP_Y * row;
        row += 1;
        ends.push(node);
      }
    }
    for (let i = tree.nodes.length - 1; i >= 0; i -= 1) {
      const node = tree.nodes[i];
      if (node.children.length) node.y = (node.children.find((c) => c.status !== "failed") || node.children[0]).y;
    }
    tree.height = TOP + STEP_Y * row;
    tree.width = Math.max(...ends.map((node) => node.x)) + 200;
    tree.columns = [];
    for (const node of tree.nodes) (tree.columns[node.depth] ||= []).push(node);
    for (const column of tree.columns) column.sort((a, b) => a.y - b.y);
  }

  /* ---- the forest ---- */

  let tree = null, picked = null, drawn = new Map();

  function visible() {
    return run.trees.filter((candidate) => candidate.mixed || !$("mixed").checked);
  }

  function listTrees() {
    const found = visible();
    $("shown").textContent = `${number(found.length)} of ${number(run.trees.length)} trees`;
    $("rows").replaceChildren(...found.map(treeRow));
    markRow();
  }

  function treeRow(candidate) {
    const { good, bad, none, infra } = candidate.counts;
    const bar = el("div", { class: "share" });
    for (const [key, count] of Object.entries({ good, bad, none, infra })) {
      if (count) bar.append(el("i", { class: key }));
      if (count) bar.lastChild.style.flexGrow = count;
    }
    const leaves = good + bad + none;
    const line = el("div", { class: "row", role: "option", onclick: () => pickTree(candidate) },
      el("div", { class: "top" },
        el("span", { class: "name", title: candidate.task }, candidate.task),
        el("span", { class: "count" }, el("span", { class: "good" }, String(good)), ` / ${leaves}`)),
      el("div", { class: "sub" },
        el("span", {}, `${candidate.group} \u00b7 ${candidate.level}`),
        el("span", {}, candidate.mixed ? "mixed" : !leaves ? "empty" : good ? "all succeed" : bad ? "all fail" : "unscored")),
      bar);
    line.tree = candidate;
    return line;
  }

  function markRow() {
    for (const line of $("rows").children) {
      const here = line.tree === tree;
      line.setAttribute("aria-selected", String(here));
      if (here) line.scrollIntoView({ block: "nearest" });
    }
  }

  function pickTree(candidate, node) {
    tree = candidate;
    layOut(tree);
    draw();
    markRow();
    pick(node || tree.nodes[0]);
  }

  function moveTree(by) {
    const found = visible();
    const next = found[Math.max(0, Math.min(found.length - 1, found.indexOf(tree) + by))];
    if (next && next !== tree) pickTree(next);
  }

  /* ---- one tree ---- */

  function draw() {
    const root = svg("svg", { width: tree.width, height: tree.height, role: "img" });
    const edges = svg("g"), nodes = svg("g");
    drawn = new Map();
    for (const node of tree.nodes) {
      const parts = { edge: node.parent === null ? null : edge(node), shape: shape(node) };
      if (parts.edge) edges.append(parts.edge);
      nodes.append(parts.shape);
      drawn.set(node, parts);
    }
    root.append(edges, nodes);
    $("canvas").replaceChildren(root);
    $("canvas").scrollTo(0, 0);
    const { good, bad, none, infra } = tree.counts;
    $("title").replaceChildren(el("b", {}, tree.task), ` \u00b7 ${tree.nodes.length - 1} turns`);
    $("legend").replaceChildren(...Object.entries({ good, bad, none, infra }).filter(([, n]) => n).map(([key, n]) =>
      el("span", {}, el("span", { class: key }, MARKS[key]), ` ${n} ${WORDS[key]}`)),
    el("span", { title: "dashed: a continuation from a snapshot; ring: turns where it branches" }, "\u25cc branch"));
  }

  function edge(node) {
    const from = tree.nodes[node.parent];
    const [x, y, tx, ty] = [from.x, from.y, node.x, node.y];
    const bend = ty > y ? 8 : -8;
    const path = ty === y ? `M${x} ${y}H${tx}` : `M${x} ${y}V${ty - bend}Q${x} ${ty} ${x + 8} ${ty}H${tx}`;
    const branched = node.origin === node.parent && node.parent !== 0;
    return svg("path", { d: path, class: branched ? "edge branch" : "edge" });
  }

  function shape(node) {
    const group = svg("g", { class: "node", transform: `translate(${node.x} ${node.y})` });
    group.append(svg("circle", { r: 12, class: "hit" }));
    if (node.status === "failed") group.append(svg("path", { d: "M0-7L7 0L0 7L-7 0Z", class: "fill-infra" }));
    else if (node.status === "leaf") leafShape(group, outcome(node));
    else innerShape(group, node);
    if (!node.children.length) {
      const label = svg("text", { x: 13, y: 4 });
      label.textContent = leafLabel(node);
      group.append(label);
    }
    group.addEventListener("click", () => pick(node));
    return group;
  }

  function leafShape(group, kind) {
    group.append(svg("circle", { r: 7.5, class: `fill-${kind}` }));
    const mark = { good: "M-3.4 .2L-1 2.8L3.6-2.6", bad: "M-2.7-2.7L2.7 2.7M2.7-2.7L-2.7 2.7" }[kind];
    if (mark) group.append(svg("path", { d: mark, class: "mark" }));
  }

  /* The disc of an inner node is a pie: the share of successes below it. */
  function innerShape(group, node) {
    const { good, bad } = node.below, known = good + bad;
    const kind = !known ? "none" : good ? (bad ? "bad" : "good") : "bad";
    const radius = node.depth ? 5.5 : 7.5;
    group.append(svg("circle", { r: radius, class: `fill-${kind}` }));
    if (good && bad) {
      const turn = 2 * Math.PI * (good / known);
      const x = radius * Math.sin(turn), y = -radius * Math.cos(turn);
      const arc = `M0 0V${-radius}A${radius} ${radius} 0 ${turn > Math.PI ? 1 : 0} 1 ${x} ${y}Z`;
      group.append(svg("path", { d: arc, class: "fill-good" }));
    }
    if (node.depth && node.children.filter((child) => child.status !== "failed").length > 1) {
      group.append(svg("circle", { r: radius + 3, class: "ring" }));
    }
  }

  function leafLabel(node) {
    if (node.status === "failed") return node.failure;
    if (node.status === "open") return "cut off";
    const total = path(node).reduce((sum, step) => sum + (step.reward || 0), 0);
    return node.stop === "terminated" ? short(total) : `${short(total)} ${node.stop}`;
  }

  function path(node) {
    const found = [node];
    while (found[0].parent !== null) found.unshift(tree.nodes[found[0].parent]);
    return found;
  }

  function pick(node) {
    picked = node;
    for (const { edge, shape } of drawn.values()) {
      if (edge) edge.classList.remove("on");
      shape.querySelector(".halo")?.remove();
    }
    for (const step of path(node)) {
      const { edge } = drawn.get(step);
      edge?.classList.add("on");
      edge?.parentNode.append(edge); // in front of the others
    }
    const { shape } = drawn.get(node);
    shape.append(svg("circle", { r: 11, class: "halo" }));
    shape.scrollIntoView({ block: "nearest", inline: "nearest" });
    showPanel(node);
    try {
      history.replaceState(null, "", `#${run.trees.indexOf(tree)}/${node.path}`);
    } catch { /* some browsers refuse this for local files */ }
  }

  function move(key) {
    const column = tree.columns[picked.depth], at = column.indexOf(picked);
    const next = {
      ArrowLeft: tree.nodes[picked.parent],
      ArrowRight: picked.children.find((child) => child.status !== "failed") || picked.children[0],
      ArrowUp: column[at - 1],
      ArrowDown: column[at + 1],
    }[key];
    if (next) pick(next);
  }

  /* ---- one turn ---- */

  function showPanel(node) {
    const parts = [el("h2", {}, node.parent === null ? "Prompt" : `Turn ${node.path}`), chips(node)];
    if (node.error) parts.push(el("pre", { class: "error bad" }, node.error));
    const said = [el("h3", {}, "Conversation"), ...conversation(node)];
    const tokens = [...tokenBox(node), ...rewards(node)];
    parts.push(...(node.parent === null ? [...said, ...tokens] : [...tokens, ...said]));
    parts.push(el("p", { class: "hint" }, ...["\u2190", "\u2192", "\u2191", "\u2193"].map((key) => el("kbd", {}, key)),
      " move in the tree, ", el("kbd", {}, "["), " ", el("kbd", {}, "]"), " to the next tree"));
    $("panel").replaceChildren(...parts);
    $("panel").scrollTo(0, 0);
  }

  function chips(node) {
    const facts = [];
    const add = (name, value, kind = "") => facts.push(el("span", { class: `chip ${kind}` }, `${name} `, el("b", {}, String(value))));
    if (node.parent === null) {
      add("task", tree.task);
      add("level", tree.level);
      add("prompt tokens", number(node.reply.length));
    } else {
      const kind = outcome(node);
      if (node.status !== "open") add(MARKS[kind], WORDS[kind], kind);
      if (node.stop) add("stop", node.stop);
      if (node.failure) add("failure", node.failure);
      add("reward", short(node.reward || 0));
      add("sampled", number(node.ids.length));
      add("sum log-prob", node.lp.reduce((sum, value) => sum + value, 0).toFixed(2));
      add("finish", node.finish || "\u2013");
      add("policy version", node.version || 0);
      add("prefilled", number(node.prefilled || 0));
      add("cached", number(node.cached || 0));
      if (node.attempt) add("attempt", node.attempt + 1);
      if (node.cost) add("tool cost", short(node.cost));
      if (node.reset) add("context", "rendered anew");
      if (node.propensity && node.propensity !== 1) add("propensity", short(node.propensity));
    }
    if (node.children.length) {
      add("below", `${node.below.good} of ${node.below.good + node.below.bad} succeed`);
      if (node.children.length > 1) add("continuations", node.children.length);
    }
    return el("div", { class: "chips" }, ...facts);
  }

  function tokenBox(node) {
    if (!node.ids.length && !node.reply.length) return [];
    const readout = el("div", { class: "readout" }, " ");
    const box = el("div", { class: "tokens", onmouseover: (event) => {
      if (event.target.dataset.about) readout.textContent = event.target.dataset.about;
    } });
    node.ids.forEach((id, i) => box.append(token(id, node.lp[i])));
    node.reply.forEach((id) => box.append(token(id, null)));
    const scale = [el("span", { class: "scale" }, "log-prob 0", el("i"), `\u2212${HEAT_AT}`),
      el("span", { class: "scale" }, "grey: added by env and template")];
    const turn = node.parent !== null;
    return [el("h3", {}, turn ? "Tokens of this turn" : "Tokens of the prompt", ...(turn ? scale : [])), box, readout];
  }

  function token(id, logprob) {
    const piece = run.pieces[id];
    const shown = piece === undefined ? `${id} ` : piece.replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u2192\t") || "\u2205";
    const about = [`id ${id}`];
    if (piece !== undefined) about.push(JSON.stringify(piece));
    if (logprob === null) about.push("not sampled");
    else about.push(`log-prob ${logprob.toFixed(4)}`, `p ${Math.exp(logprob).toPrecision(3)}`);
    const found = el("span", { class: logprob === null ? "context" : "", title: about.join("  ") }, shown);
    found.dataset.about = about.join("   ");
    if (logprob !== null) {
      found.style.backgroundColor = `rgba(var(--heat), ${(0.85 * Math.min(1, -logprob / HEAT_AT)).toFixed(3)})`;
    }
    return found;
  }

  function rewards(node) {
    const terms = Object.entries(node.terms || {});
    if (!terms.length) return [];
    return [el("h3", {}, "Reward terms"), el("div", { class: "chips" }, ...terms.map(([name, value]) =>
      el("span", { class: "chip" }, `${name} `, el("b", {}, short(value)))))];
  }

  function conversation(node) {
    const found = tree.messages.map((message) => messageBox(message, false));
    for (const step of path(node).slice(1)) {
      const now = step === node;
      if (step.status !== "failed") found.push(messageBox({ role: "assistant", content: step.text || "" }, now, step));
      (step.answer || []).forEach((message, i) => found.push(messageBox(message, now, null, (step.calls || [])[i])));
    }
    return found;
  }

  function messageBox(message, now, step = null, record = null) {
    const box = el("div", { class: `message ${message.role}${now ? " now" : ""}` });
    const refused = record && record.ok === false;
    box.append(el("div", { class: "who" }, message.role, step ? ` \u00b7 turn ${step.path}` : "",
      refused ? el("span", { class: "bad" }, " \u00b7 refused") : null));
    if (message.role === "assistant") box.append(...spoken(String(message.content)));
    else if (message.role === "system") {
      const text = String(message.content), shown = text.length > 80 ? `${text.slice(0, 80)}\u2026` : text;
      const tools = tree.tools.length ? ` \u00b7 tools: ${tree.tools.join(", ")}` : "";
      box.append(el("details", {}, el("summary", {}, `${shown}${tools}`),
        el("pre", {}, text)));
    } else box.append(el("pre", {}, String(message.content)));
    return box;
  }

  /* An assistant's text, its tool calls as name(key: value). What cannot be read is shown as it was written. */
  function spoken(text) {
    const found = [];
    let rest = 0;
    for (const match of text.matchAll(/<tool_call>([\s\S]*?)<\/tool_call>/g)) {
      if (text.slice(rest, match.index).trim()) found.push(el("pre", {}, text.slice(rest, match.index).trim()));
      found.push(callBox(match[1]) || el("pre", { class: "bad" }, match[0]));
      rest = match.index + match[0].length;
    }
    if (text.slice(rest).trim() || !found.length) found.push(el("pre", {}, text.slice(rest).trim() || "(empty)"));
    return found;
  }

  function callBox(body) {
    let call;
    try {
      call = JSON.parse(body);
    } catch {
      return null;
    }
    if (!call || typeof call.name !== "string") return null;
    if (call.arguments !== undefined && Object.prototype.toString.call(call.arguments) !== "[object Object]") return null;
    const box = el("div", { class: "call" }, el("b", {}, call.name), "(");
    Object.entries(call.arguments || {}).forEach(([key, value], i) => {
      box.append(i ? ", " : "", el("span", { class: "key" }, `${key}: `), JSON.stringify(value));
    });
    box.append(")");
    return box;
  }

  /* ---- start ---- */

  function header() {
    const { summary, config } = run;
    document.title = `${run.run} \u00b7 agentgym`;
    $("run").textContent = run.run;
    $("about").textContent = [config.env, config.policy, config.allocator, `seed ${config.seed}`].filter(Boolean).join(" \u00b7 ");
    const failures = Object.values(summary.failures).reduce((sum, n) => sum + n, 0);
    const facts = {
      trees: number(summary.trees), leaves: number(summary.leaves), turns: number(summary.nodes),
      success: share(summary.success), "effective ratio": share(summary.effective_ratio),
      "sampled tokens": number(summary.sampled_tokens), "prefill saved": number(summary.saved_prefill_tokens),
      failures: number(failures),
    };
    $("stats").replaceChildren(...Object.entries(facts).map(([name, value]) =>
      el("span", {}, `${name} `, el("b", {}, value))));
  }

  function start() {
    run.trees.forEach(prepare);
    header();
    listTrees();
    $("mixed").addEventListener("change", () => {
      listTrees();
      if (!visible().includes(tree) && visible().length) pickTree(visible()[0]);
    });
    document.addEventListener("keydown", (event) => {
      if (!tree || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "[" || event.key === "]") moveTree(event.key === "]" ? 1 : -1);
      else if (!event.key.startsWith("Arrow")) return;
      else if ($("rows").contains(document.activeElement) && event.key === "ArrowUp") moveTree(-1);
      else if ($("rows").contains(document.activeElement) && event.key === "ArrowDown") moveTree(1);
      else move(event.key);
      event.preventDefault();
    });
    const [at, wanted] = decodeURIComponent(location.hash.slice(1)).split("/");
    const first = run.trees[Number(at)] || run.trees.find((candidate) => candidate.mixed) || run.trees[0];
    if (first) pickTree(first, first.nodes.find((node) => node.path === wanted));
  }

  start();
})();
