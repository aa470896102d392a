/* Playground: sends one prompt to one or two models, and writes the streams into the page as text, never as HTML. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("ask");
  if (!form) return;
  const run = document.getElementById("run"), stop = document.getElementById("stop");
  const tip = document.getElementById("token-tip"), curl = document.getElementById("curl");
  const field = (name) => form.elements[name];
  const shown = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });
  let running = [];

  function messages() {
    const system = field("system").value;
    const user = { role: "user", content: field("prompt").value };
    return system.trim() ? [{ role: "system", content: system }, user] : [user];
  }

  function bodyFor(model) {
    const body = { model, messages: messages(), stream: true, stream_options: { include_usage: true } };
    for (const name of ["temperature", "max_tokens", "seed"]) {
      if (field(name).value !== "") body[name] = Number(field(name).value);
    }
    if (field("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    return body;
  }

  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  function showCurl() {
    const body = JSON.stringify(bodyFor(field("model_a").value), null, 2);
    const text = `curl -N ${location.origin}/v1/chat/completions \\\n  -H "Authorization: Bearer $LORAPLEX_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(body)}`;
    curl.textContent = text;
    document.getElementById("copy-curl").dataset.copy = text;
  }

  /* Yields the data of each server-sent event. */
  async function* events(body) {
    const reader = body.getReader(), decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  }

  class Side {
    constructor(name) {
      this.root = document.getElementById(`side-${name}`);
      this.model = field(`model_${name}`);
    }
    part(name) { return this.root.querySelector(`[data-part="${name}"]`); }
    say(name, text) { this.part(name).textContent = text; }
    fail(text) {
      const box = this.part("error");
      box.textContent = text;
      box.hidden = false;
      this.say("state", "failed");
    }
    clear() {
      for (const name of ["in", "out", "ttft", "rate", "cost", "request"]) this.say(name, "–");
      this.part("answer").replaceChildren();
      this.part("error").hidden = true;
      this.part("tokens").hidden = true;
      this.part("tokens").querySelector("tbody").replaceChildren();
      this.say("state", "–");
    }

    async ask() {
      this.clear();
      this.controller = new AbortController();
      this.begun = performance.now();
      this.first = this.last = this.usage = this.reason = null;
      this.part("answer").classList.add("is-running");
      this.say("state", "waiting");
      try {
        await this.read();
        if (this.part("error").hidden) this.say("state", this.reason === "length" ? "cut at the most tokens" : "complete");
      } catch (error) {
        if (error.name === "AbortError") this.say("state", "stopped");
        else this.fail("The connection broke. Try again.");
      } finally {
        this.part("answer").classList.remove("is-running");
        this.figures();
      }
    }

    async read() {
      const answer = await fetch(form.dataset.url, {
        method: "POST",
        headers: { "Content-Type": "application/json", "x-csrf": form.dataset.csrf, "Accept": "text/event-stream, application/json" },
        body: JSON.stringify(bodyFor(this.model.value.trim())),
        signal: this.controller.signal,
      });
      this.link(answer.headers.get("x-request-id"));
      if (!answer.ok || !(answer.headers.get("content-type") || "").startsWith("text/event-stream")) {
        let text = answer.redirected ? "Your session is over. Load the page again." : `The gateway answered ${answer.status}.`;
        try { text = (await answer.json()).error.message; } catch { /* Not the gateway's JSON. */ }
        this.fail(text);
        return;
      }
      form.dispatchEvent(new CustomEvent("loraplex:sent", { bubbles: true }));
      for await (const data of events(answer.body)) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) { this.fail(event.error.message); return; }
        if (event.usage) this.usage = event.usage;
        for (const choice of event.choices || []) this.add(choice);
      }
    }

    add(choice) {
      if (choice.finish_reason) this.reason = choice.finish_reason;
      const text = choice.delta?.content, tokens = choice.logprobs?.content;
      if (!text && !tokens?.length) return;
      this.last = performance.now();
      if (this.first === null) {
        this.first = this.last;
        this.say("state", "running");
      }
      const box = this.part("answer"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      /* The tokens are used only if they are the text, which they are not while a character is incomplete. */
      if (tokens?.length && tokens.map((one) => one.token).join("") === (text || "")) box.append(...tokens.map((one) => this.token(one)));
      else if (text) box.append(text);
      if (tokens?.length) this.rows(tokens);
      if (atEnd) box.scrollTop = box.scrollHeight;
      this.figures();
    }

    token(one) {
      const span = document.createElement("span"), probability = Math.exp(one.logprob);
      span.className = `token ${probability < .2 ? "p1" : probability < .5 ? "p2" : probability < .8 ? "p3" : "p4"}`;
      span.textContent = one.token;
      span.loraplexToken = one;
      return span;
    }

    rows(tokens) {
      const box = this.part("tokens"), body = box.querySelector("tbody");
      box.hidden = false;
      for (const one of tokens) {
        const row = body.insertRow();
        row.insertCell().textContent = JSON.stringify(one.token);
        const cell = row.insertCell();
        cell.className = "n";
        cell.textContent = percent(one.logprob);
        const others = (one.top_logprobs || []).filter((other) => other.token !== one.token).slice(0, 3);
        row.insertCell().textContent = others.map((other) => `${JSON.stringify(other.token)} ${percent(other.logprob)}`).join(", ");
      }
    }

    figures() {
      const usage = this.usage;
      if (this.first !== null) this.say("ttft", `${shown(this.first - this.begun, 0)} ms`);
      if (!usage) return;
      const cached = usage.prompt_tokens_details?.cached_tokens || 0;
      this.say("in", `${shown(usage.prompt_tokens, 0)} tokens${cached ? `, ${shown(cached, 0)} cached` : ""}`);
      this.say("out", `${shown(usage.completion_tokens, 0)} tokens`);
      if (usage.completion_tokens > 1 && this.last > this.first) {
        this.say("rate", shown(1000 * (usage.completion_tokens - 1) / (this.last - this.first), 1));
      }
      if (usage.cost !== undefined) this.say("cost", `${shown(usage.cost, 6)} ${usage.currency}`);
    }

    link(id) {
      if (!id) return;
      const link = document.createElement("a");
      link.href = form.dataset.requests + encodeURIComponent(id);
      link.textContent = `…${id.slice(-8)}`;
      link.title = id;
      this.part("request").replaceChildren(link);
    }
  }

  function percent(logprob) {
    const value = 100 * Math.exp(logprob);
    return value && value < .1 ? "< 0.1 %" : `${shown(value, value < 10 ? 1 : 0)} %`;
  }

  const sides = [new Side("a"), new Side("b")];
  async function start() {
    if (running.length || !form.reportValidity()) return;
    const asked = sides.filter((side) => side.model.value.trim());
    if (!asked.length) { field("model_a").focus(); return; }
    const url = new URL(location.href);
    for (const name of ["a", "b"]) url.searchParams.set(name, field(`model_${name}`).value.trim());
    history.replaceState(null, "", url);
    running = asked;
    run.disabled = true;
    stop.disabled = false;
    for (const side of sides) if (!asked.includes(side)) side.clear();
    await Promise.all(asked.map((side) => side.ask()));
    running = [];
    run.disabled = false;
    stop.disabled = true;
  }
  const end = () => { for (const side of running) side.controller.abort(); };

  form.addEventListener("submit", (event) => { event.preventDefault(); start(); });
  run.disabled = false;
  form.addEventListener("input", showCurl);
  stop.addEventListener("click", end);
  addEventListener("pagehide", end);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); }
    if (event.key === "Escape") end();
  });

  form.addEventListener("mouseover", (event) => {
    const one = event.target.loraplexToken;
    if (!one) { tip.hidden = true; return; }
    const table = document.createElement("table");
    const others = (one.top_logprobs || []).some((other) => other.token === one.token) ? one.top_logprobs : [one, ...(one.top_logprobs || [])];
    for (const other of others) {
      const row = table.insertRow();
      if (other.token === one.token) row.className = "chosen";
      row.insertCell().textContent = JSON.stringify(other.token);
      row.insertCell().textContent = percent(other.logprob);
    }
    tip.replaceChildren(table);
    tip.hidden = false;
    const at = event.target.getBoundingClientRect(), box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.width - 8))}px`;
    tip.style.top = `${at.bottom + box.height + 8 < innerHeight ? at.bottom + 6 : at.top - box.height - 6}px`;
  });
  form.addEventListener("mouseleave", () => { tip.hidden = true; });
  showCurl();
});
