"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const tell = (id, text) => { const place = byId(id); if (place) place.textContent = text; };
  const empty = { device: "", family: "", find: "", severity: "", code: "", text: "" };
  let state = { ...empty };

  // The state of the page is in the fragment, so that a link shows what its sender saw.
  function fragment() {
    const kept = Object.entries(state).filter(([, value]) => value);
    return kept.length ? "#" + new URLSearchParams(kept) : "";
  }

  function read() {
    const given = new URLSearchParams(location.hash.slice(1));
    state = { ...empty };
    for (const name of Object.keys(empty)) state[name] = given.get(name) || "";
    // A link may be older than the report.
    if (!all("article").some((area) => area.dataset.area === state.device)) state.device = "";
  }

  function change(changes) {
    Object.assign(state, changes);
    history.replaceState(null, "", location.pathname + location.search + fragment());
    show();
  }

  // Names are searched by family: a "*" of its template stands for the numbers listed beside it.
  function numbersOf(text) {
    if (!text || text.includes("…")) return null;
    return text.split(", ").map((run) => {
      const [first, last] = run.split("-").map(Number);
      return [first, last === undefined ? first : last];
    });
  }

  function hasNumber(runs, digits, begins, ends) {
    if (runs === null) return true;
    if (begins && ends) {
      return digits === String(Number(digits)) && runs.some(([a, b]) => a <= +digits && +digits <= b);
    }
    for (const [first, last] of runs) {
      if (last - first > 99999) return true;
      for (let n = first; n <= last; n++) {
        const told = String(n);
        if (begins ? told.startsWith(digits) : ends ? told.endsWith(digits) : told.includes(digits)) return true;
      }
    }
    return false;
  }

  function tokensOf(row) {
    const indices = JSON.parse(row.dataset.indices);
    const text = row.dataset.family.toLowerCase();
    const isTemplate = text.split("*").length - 1 === indices.length;
    let slot = 0;
    return [...text].map((char) => (char === "*" && isTemplate ? numbersOf(indices[slot++]) ?? [[0, Infinity]] : char));
  }

  function isIn(text, tokens) {
    const fits = (at, i) => {
      if (i === text.length) return true;
      if (at === tokens.length) return false;
      const token = tokens[at];
      if (typeof token === "string") return token === text[i] && fits(at + 1, i + 1);
      if (text[i] === "*") return fits(at + 1, i + 1);
      const digits = /^[0-9]*/.exec(text.slice(i))[0];
      // What the text begins or ends with may be a part of a number.
      return digits !== "" && hasNumber(token, digits, i > 0, i + digits.length < text.length) &&
        fits(at + 1, i + digits.length);
    };
    return text === "" || tokens.some((_, at) => fits(at, 0));
  }

  const rows = all("tr[data-family]").map((row) => ({ row, tokens: tokensOf(row), area: row.closest("article") }));
  const tiles = all(".tile");

  function showFamilies() {
    const wanted = state.find.trim().toLowerCase();
    let found = 0, total = 0, elsewhere = 0;
    const hits = new Map();
    for (const { row, tokens, area } of rows) {
      const hit = isIn(wanted, tokens);
      row.hidden = !hit;
      row.classList.toggle("chosen", row.dataset.family === state.family);
      if (area.hidden) elsewhere += hit;
      else { total += 1; found += hit; }
      if (!hits.has(area)) hits.set(area, new Set());
      if (hit) hits.get(area).add(row.dataset.family);
    }
    for (const tile of tiles) {
      const { family } = tile.dataset;
      tile.classList.toggle("dim", wanted !== "" && !(family && hits.get(tile.closest("article"))?.has(family)));
      if (family) tile.setAttribute("aria-pressed", String(family === state.family));
    }
    for (const area of all("article")) {
      if (wanted && hits.get(area)?.size) area.querySelector("details").open = true;
    }
    const more = elsewhere ? `, ${elsewhere} elsewhere` : "";
    tell("found", wanted ? `${found} of ${total} families${more}` : "");
  }

  function showPicked() {
    for (const area of all("article")) {
      const row = all("tr[data-family]", area).find((each) => each.dataset.family === state.family);
      const panel = area.querySelector(".picked");
      panel.replaceChildren();
      if (!state.family || !row) continue;
      for (const cell of row.cells) {
        const parts = all("p", cell).map((part) => part.textContent);
        const text = parts.length ? parts.join("; ") : cell.textContent;
        if (!text) continue;
        const line = document.createElement("p");
        if (cell.cellIndex === 0) line.className = "name";
        line.textContent = cell.cellIndex === 0 ? row.dataset.family : `${cell.dataset.label}: ${text}`;
        panel.append(line);
      }
    }
  }

  function showAudit() {
    const severities = state.severity ? state.severity.split(",") : null;
    const text = state.text.trim().toLowerCase();
    let found = 0;
    const notes = all("tr[data-severity]");
    for (const row of notes) {
      const hit = (!severities || severities.includes(row.dataset.severity)) &&
        (!state.code || row.dataset.code === state.code) &&
        (!text || row.textContent.toLowerCase().includes(text));
      row.hidden = !hit;
      found += hit;
    }
    for (const box of all("input[name=severity]")) box.checked = !severities || severities.includes(box.value);
    tell("counted", `${found} of ${notes.length} shown`);
  }

  function show() {
    for (const area of all("article")) area.hidden = state.device !== "" && area.dataset.area !== state.device;
    for (const button of all("button[data-device]")) {
      button.setAttribute("aria-pressed", String(button.dataset.device === state.device));
    }
    for (const [id, name] of [["find", "find"], ["code", "code"], ["text", "text"]]) {
      const field = byId(id);
      if (field && field.value !== state[name]) field.value = state[name];
    }
    showFamilies();
    showPicked();
    showAudit();
    const share = byId("share");
    if (share) share.href = location.pathname + location.search + fragment();
  }

  function severitiesChosen() {
    const boxes = all("input[name=severity]");
    const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
    return chosen.length === boxes.length ? "" : chosen.join(",") || "none";
  }

  function move(event) {
    const tile = event.target.closest(".tile");
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const mine = tile ? all(".tile", tile.parentElement) : [];
    const at = event.key === "Home" ? 0 : event.key === "End" ? mine.length - 1 : mine.indexOf(tile) + step;
    const next = mine[at];
    if (!next) return;
    event.preventDefault();
    tile.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  document.addEventListener("click", (event) => {
    const target = event.target.closest("button, a");
    if (!target) return;
    if (target.dataset.family !== undefined) {
      change({ family: target.dataset.family === state.family ? "" : target.dataset.family });
    } else if (target.dataset.rest !== undefined) {
      const details = target.closest("article").querySelector("details");
      details.open = true;
      details.scrollIntoView({ block: "nearest" });
    } else if (target.dataset.device !== undefined) {
      change({ device: target.dataset.device });
    } else if (target.id === "share") {
      event.preventDefault();
      const failed = () => tell("copied", "Copy the address of this page.");
      if (navigator.clipboard) {
        navigator.clipboard.writeText(target.href).then(() => tell("copied", "Copied."), failed);
      } else failed();
    } else if (target.id === "reset") {
      change({ ...empty });
    } else if (target.getAttribute("href")?.startsWith("#")) {
      event.preventDefault();
      const place = byId(target.getAttribute("href").slice(1));
      place.scrollIntoView();
      place.focus({ preventScroll: true });
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.family) change({ family: "" });
    else if (/^(Arrow|Home|End)/.test(event.key)) move(event);
  });
  document.addEventListener("input", (event) => {
    const { id, name, value } = event.target;
    if (id === "find") change({ find: value });
    else if (id === "text") change({ text: value });
    else if (id === "code") change({ code: value });
    else if (name === "severity") change({ severity: severitiesChosen() });
  });
  addEventListener("hashchange", () => { read(); show(); });
  addEventListener("beforeprint", () => { for (const details of all("details")) details.open = true; });
  for (const map of all(".treemap")) all(".tile", map).forEach((tile, at) => { tile.tabIndex = at ? -1 : 0; });
  document.documentElement.classList.add("js");
  read();
  show();
})();
