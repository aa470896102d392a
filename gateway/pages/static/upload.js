/* Upload of an adapter with its progress. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("upload");
  if (!form) return;
  const part = (id) => document.getElementById(id);
  const NAMES = ["adapter_config.json", "adapter_model.safetensors"];
  const mib = (bytes) => (bytes / 1048576).toLocaleString("en", { maximumFractionDigits: 1 });

  function fail(text) {
    part("problem").textContent = text;
    part("problem").hidden = false;
    part("state").textContent = "";
    part("progress").hidden = part("abort").hidden = true;
    form.querySelector("button").disabled = false;
  }

  /* Returns the body, or a text that says what is wrong. */
  function bodyOf(files) {
    const body = new FormData();
    body.append("name", form.elements.name.value.trim());
    if (files.length === 1 && !NAMES.includes(files[0].name)) {
      body.append("file", files[0]);
      return body;
    }
    for (const name of NAMES) {
      const file = files.find((one) => one.name === name);
      if (!file) return `Choose ${NAMES.join(" and ")}, or one archive with both.`;
      body.append(name, file);
    }
    return body;
  }

  form.querySelector("button").disabled = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const files = [...form.elements.files.files], size = files.reduce((sum, file) => sum + file.size, 0);
    part("problem").hidden = true;
    const body = bodyOf(files);
    if (typeof body === "string") { fail(body); return; }
    if (size > Number(form.dataset.most)) { fail(`The files have ${mib(size)} MiB; at most ${mib(Number(form.dataset.most))} MiB are accepted.`); return; }
    const request = new XMLHttpRequest(), begun = performance.now();
    request.open("POST", form.dataset.url);
    request.setRequestHeader("x-csrf", form.dataset.csrf);
    request.setRequestHeader("Accept", "application/json");
    request.upload.onprogress = ({ loaded, total }) => {
      part("progress").value = loaded / total;
      const rate = loaded / Math.max(1, performance.now() - begun) * 1000;
      part("state").textContent = loaded < total ? `${mib(loaded)} of ${mib(total)} MiB, ${mib(rate)} MiB/s` : "Received. It is being checked and probed.";
    };
    request.onload = () => {
      let answer = null;
      try { answer = JSON.parse(request.responseText); } catch { /* Not the gateway's JSON. */ }
      if (request.status === 201 || request.status === 202) {
        location.assign(`${form.dataset.folder}/${encodeURIComponent(answer.name)}?version=${answer.version}&done=upload`);
      } else {
        const error = answer?.error, isOver = new URL(request.responseURL || location.href).pathname.endsWith("/login");
        if (isOver) fail("Your session has ended. Load the page again and log in; the name stays in the form.");
        else fail(error ? `${error.message}${!error.param || error.message.startsWith(`${error.param}:`) ? "" : ` (${error.param})`}` : `The gateway answered ${request.status}.`);
      }
    };
    request.onerror = () => fail("The connection broke. Try again.");
    request.onabort = () => fail("The upload was stopped.");
    part("abort").onclick = () => request.abort();
    part("abort").hidden = part("progress").hidden = false;
    form.querySelector("button").disabled = true;
    part("state").textContent = "Sending.";
    request.send(body);
  });
});
