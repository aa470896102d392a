/* Behaviour of every page. It works on attributes, so templates need no scripts of their own:
   data-events: URL of the server's events          data-live="15": replaced with its new self every 15 s
   data-toggle="id": opens and closes a part        data-copy="text": copies the text
   data-confirm="name": enables its button once the name is typed
   Without this file every page still works: links, forms and tables need none of it. */
"use strict";
(() => {
  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

  function relative(at, now) {
    const seconds = (now - at) / 1000, distance = Math.abs(seconds);
    if (distance < 1) return "now";
    const [length, unit] = UNITS.find(([size]) => distance >= size);
    const shown = `${Math.floor(distance / length)} ${unit}`;
    return seconds > 0 ? `${shown} ago` : `in ${shown}`;
  }

  function refreshTimes(root) {
    const now = Date.now();
    for (const time of root.querySelectorAll("time[data-relative]")) {
      const shown = relative(Date.parse(time.dateTime), now);
      if (time.textContent !== shown) time.textContent = shown;
    }
  }

  function say(text) {
    const toast = document.getElementById("toast");
    if (!toast) return;
    toast.textContent = text;
    toast.hidden = false;
    clearTimeout(say.timer);
    say.timer = setTimeout(() => { toast.hidden = true; }, 2500);
  }

  const THEMES = ["auto", "light", "dark"];
  function switchTheme() {
    const now = document.documentElement.dataset.theme || "auto";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    document.cookie = `loraplex_theme=${next}; path=/; max-age=31536000; samesite=lax`;
    say({ auto: "Colours as the system", light: "Light colours", dark: "Dark colours" }[next]);
    document.dispatchEvent(new CustomEvent("loraplex:theme"));
  }

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-toggle], [data-copy], [data-theme-switch]");
    if (target && "themeSwitch" in target.dataset) switchTheme();
    else if (target && target.dataset.toggle) {
      const isOpen = document.getElementById(target.dataset.toggle).classList.toggle("is-open");
      target.setAttribute("aria-expanded", String(isOpen));
    } else if (target && target.dataset.copy) {
      navigator.clipboard.writeText(target.dataset.copy).then(() => say("Copied"), () => say("The browser did not allow the copy"));
    }
    for (const open of document.querySelectorAll(".account[open], .strip[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
  });

  document.addEventListener("keydown", (event) => {
    const box = document.querySelector("[data-search]");
    if (event.key === "/" && box && !event.target.closest("input, textarea, select")) {
      event.preventDefault();
      box.focus();
    }
    if (event.key !== "Escape") return;
    for (const open of document.querySelectorAll(".account[open], .strip[open]")) {
      open.open = false;
      open.querySelector("summary").focus();
    }
    const menu = document.querySelector(".menu-button[aria-expanded=true]");
    if (menu) { menu.click(); menu.focus(); }
  });

  function armConfirmations(root) {
    for (const form of root.querySelectorAll("form[data-confirm]")) {
      const field = form.elements.typed, button = form.querySelector("button");
      const check = () => { button.disabled = field.value !== form.dataset.confirm; };
      field.addEventListener("input", check);
      check();
    }
  }

  /* Live fragments: one request brings the new page, and each marked element that changed is replaced by its id. An
     element with the focus, an open menu or a selection inside, or under a pressed button of the mouse, stays as it is
     until the next time. One request at a time: the answer to an earlier one may come later. */
  let lastRefresh = Date.now(), isRefreshing = false;
  async function refreshFragments() {
    const marked = [...document.querySelectorAll("[data-live][id]")];
    if (!marked.length || document.hidden || sayEnded.done) return;
    const period = 1000 * Math.min(...marked.map((element) => Number(element.dataset.live)));
    if (isRefreshing || Date.now() - lastRefresh < period) return;
    lastRefresh = Date.now();
    isRefreshing = true;
    let text;
    try {
      const answer = await fetch(location.href, { headers: { "X-Live": "1" }, redirect: "manual", signal: AbortSignal.timeout(30000) });
      if (answer.type === "opaqueredirect") sayEnded();
      if (!answer.ok) return;
      text = await answer.text();
    } catch { return; } finally { isRefreshing = false; }
    const page = new DOMParser().parseFromString(text, "text/html");
    for (const element of marked) {
      const fresh = page.getElementById(element.id);
      const isBusy = element.contains(document.activeElement) || element.querySelector("details[open]") || element.matches(":active") ||
        (getSelection().type === "Range" && element.contains(getSelection().anchorNode));
      if (!fresh || isBusy) continue;
      if ("chart" in element.dataset) {
        if (element.dataset.chart !== fresh.dataset.chart) {
          element.dataset.chart = fresh.dataset.chart;
          document.dispatchEvent(new CustomEvent("loraplex:chart", { detail: element }));
        }
      } else if (element.innerHTML !== fresh.innerHTML) element.replaceChildren(...fresh.childNodes);
    }
  }

  /* The log-in page is the only one to which these requests are redirected. */
  async function checkSession(url) {
    try {
      const answer = await fetch(url, { method: "HEAD", redirect: "manual" });
      if (answer.type === "opaqueredirect") sayEnded();
    } catch { return; }
  }

  function sayEnded() {
    const note = document.getElementById("session-ended");
    if (note) {
      const here = location.pathname + location.search, link = note.querySelector("a");
      link.href = `${link.href.split("?")[0]}?next=${encodeURIComponent(here)}`;
      note.hidden = false;
    }
    document.querySelector("[data-strip]")?.replaceChildren();
    sayEnded.done = true;
  }

  /* Shows the newest strip. It waits while the strip is pressed: if the pressed element is replaced, the click is lost. */
  let strips = 0;
  function showStrip(text, number = ++strips) {
    const strip = document.querySelector("[data-strip]");
    if (number < strips || sayEnded.done) return;
    if (strip.matches(":active")) { setTimeout(showStrip, 50, text, number); return; }
    const isOpen = strip.querySelector("details[open]") !== null;
    const hadFocus = strip.contains(document.activeElement);
    strip.innerHTML = text;
    const details = strip.querySelector("details");
    if (details && isOpen) details.open = true;
    if (details && hadFocus) details.querySelector("summary").focus();
  }

  function follow() {
    const url = document.body.dataset.events;
    if (!url || !window.EventSource || sayEnded.done) return;
    const source = new EventSource(url);
    source.addEventListener("strip", (event) => showStrip(event.data));
    source.addEventListener("tick", refreshFragments);
    source.addEventListener("end", (event) => {
      source.close();
      if (event.data === "session") sayEnded();
      else setTimeout(follow, 5000);
    });
    source.onerror = async () => {
      if (source.readyState !== EventSource.CLOSED) return;
      await checkSession(url);
      if (!sayEnded.done) setTimeout(follow, 30000);
    };
    addEventListener("pagehide", () => source.close(), { once: true });
  }

  document.addEventListener("DOMContentLoaded", () => {
    armConfirmations(document);
    refreshTimes(document);
    setInterval(() => refreshTimes(document), 5000);
    follow();
  });
  document.addEventListener("htmx:afterSettle", (event) => {
    armConfirmations(event.target);
    document.dispatchEvent(new CustomEvent("loraplex:charts"));
  });
})();
