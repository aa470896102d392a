/* Drafts of long forms: what a person types outlives the end of the session, in this tab only.

   form[data-draft="key"]: its fields are kept in sessionStorage while they are typed, under the key and the person, and
   are set again when the person opens the form the next time. data-draft-only: a selector of the kept fields.
   A draft ends when the form is saved (the next page has ?done=), cancelled or discarded, at log-out, when another
   person logs in, and an hour after the last change, also on the log-in page. Hidden fields, passwords and files are not
   kept, and forms of keys have no data-draft. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const PREFIX = "draft ", SENT = "sent", MAX_AGE = 60 * 60 * 1000, person = document.body.dataset.person;
  const forgetOld = () => forget((name) => !(Date.now() - read(name)?.at < MAX_AGE));
  forgetOld();
  setInterval(forgetOld, 60 * 1000);
  /* Pages without a person, such as the log-in, leave newer drafts alone. */
  if (!person) return;
  const own = `${PREFIX}${person} `;
  const nameOf = (form) => own + (form.dataset.draft || new URL(form.action).pathname);
  const isBox = (field) => field.type === "checkbox" || field.type === "radio";
  const valueOf = (field) => (isBox(field) ? field.checked : field.value);
  const shownOf = (form) => form.querySelector("input[name=shown]");

  function initial(field) {
    if (isBox(field)) return field.defaultChecked;
    if (field.tagName !== "SELECT") return field.defaultValue;
    return ([...field.options].find((option) => option.defaultSelected) || field.options[0])?.value;
  }

  function fieldsOf(form) {
    const kept = [...form.querySelectorAll(form.dataset.draftOnly || "input, select, textarea")]
      .filter((field) => field.name && !["hidden", "password", "file"].includes(field.type));
    return kept.map((field) => [isBox(field) ? `${field.name}=${field.value}` : field.name, field]);
  }

  function read(name) {
    try { return JSON.parse(sessionStorage.getItem(name)); } catch { return null; }
  }

  function keep(form) {
    const before = read(nameOf(form)), fields = { ...before?.fields };
    for (const [key, field] of fieldsOf(form)) {
      if (key in fields || valueOf(field) !== initial(field)) fields[key] = valueOf(field);
    }
    /* The digests of the values that the person saw: a change by somebody else since then is still a conflict. */
    const draft = { fields, shown: shownOf(form)?.value, at: Date.now() };
    try { sessionStorage.setItem(nameOf(form), JSON.stringify(draft)); } catch { /* The storage is full or off. */ }
  }

  function forget(matches) {
    for (const name of Object.keys(sessionStorage)) {
      if (name.startsWith(PREFIX) && matches(name)) sessionStorage.removeItem(name);
    }
  }

  function restore(form) {
    const draft = read(nameOf(form)), shown = shownOf(form), now = shown?.value;
    if (!draft) return;
    /* The page that answers a conflict has newer values and digests than the draft of the form that was sent. */
    if (location.pathname.includes("/answers/") && draft.shown !== now) return;
    /* What the person typed before this script ran is newer than the draft. */
    const typed = fieldsOf(form).filter(([key, field]) => valueOf(field) !== initial(field) && draft.fields[key] !== valueOf(field));
    const changed = fieldsOf(form).filter((each) => each[0] in draft.fields && draft.fields[each[0]] !== valueOf(each[1]) && !typed.some(([key]) => key === each[0]));
    if (changed.length) fillIn(form, changed, draft, shown, now);
    if (typed.length) keep(form);
  }

  function fillIn(form, changed, draft, shown, now) {
    for (const [key, field] of changed) {
      if (isBox(field)) field.checked = draft.fields[key];
      else field.value = draft.fields[key];
    }
    if (shown && draft.shown) shown.value = draft.shown;
    const note = document.createElement("div"), text = document.createElement("div"), button = document.createElement("button");
    note.className = "banner warn";
    note.setAttribute("role", "status");
    text.textContent = "The fields have your draft, which was not saved. ";
    button.className = "button small";
    button.type = "button";
    button.textContent = "Discard the draft";
    button.addEventListener("click", () => {
      forget((name) => name === nameOf(form));
      form.reset();
      if (shown) shown.value = now;
      note.remove();
    });
    text.append(button);
    note.append(text);
    form.before(note);
    form.dispatchEvent(new Event("input", { bubbles: true }));
  }

  const sent = sessionStorage.getItem(SENT);
  sessionStorage.removeItem(SENT);
  forget((name) => !name.startsWith(own) || (name === sent && new URLSearchParams(location.search).has("done")));
  for (const form of document.querySelectorAll("form[data-draft]")) {
    restore(form);
    form.addEventListener("input", () => keep(form));
  }
  document.addEventListener("submit", ({ target }) => {
    if (new URL(target.action).pathname.endsWith("/logout")) forget(() => true);
    else if (target.method === "post" || target.dataset.draft) sessionStorage.setItem(SENT, nameOf(target));
  });
  document.addEventListener("click", ({ target }) => {
    const cancel = target.closest("form a.button");
    if (cancel) forget((name) => name === nameOf(cancel.closest("form")));
  });
  /* The playground's script sends its form without leaving the page. */
  document.addEventListener("loraplex:sent", ({ target }) => forget((name) => name === nameOf(target)));
});
