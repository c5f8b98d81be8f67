// The page stays as the server has it: a hint, or five seconds, and it is fetched again and its differences are put in.

const EVERY = 5000;
const AT_MOST_EVERY = 750;

export function startLive(changed) {
  const live = document.getElementById("live");
  const address = document.body.dataset.events;
  let held = false;
  let source = null;
  let timer = null;
  let running = false;
  let again = false;
  let last = performance.now();

  function mark(text) {
    const shown = document.getElementById("live-mark");
    if (!shown) return;
    if (shown.textContent !== text) shown.textContent = text;
    shown.classList.toggle("off", text !== "live");
  }

  function busy() {
    const focus = document.activeElement;
    const typing = live.contains(focus) && focus.matches("input:not([type=checkbox]), select, textarea");
    const reads = !document.getSelection().isCollapsed && live.contains(document.getSelection().anchorNode);
    return held || typing || reads || document.hidden || document.querySelector("dialog[open]");
  }

  async function refresh() {
    clearTimeout(timer);
    timer = null;
    if (running) {
      again = true;
      return;
    }
    running = true;
    last = performance.now();
    try {
      const answer = await fetch(location.href, { headers: { "X-Live": "1" }, redirect: "error" });
      const text = await answer.text();
      const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("live");
      if (!answer.ok || !fresh) throw new Error(String(answer.status));
      if (!held) {
        merge(live, fresh);
        changed();
        mark("live");
      }
    } catch {
      mark("not connected");
    } finally {
      running = false;
      if (again) {
        again = false;
        soon();
      } else if (timer === null) {
        timer = setTimeout(soon, EVERY);
      }
    }
  }

  function soon() {
    clearTimeout(timer);
    if (busy()) {
      timer = setTimeout(soon, 1000);
      return;
    }
    timer = setTimeout(refresh, Math.max(0, AT_MOST_EVERY - (performance.now() - last)));
  }

  function listen() {
    if (source || document.hidden) return;
    source = new EventSource(address);
    source.addEventListener("changed", () => {
      if (!running) soon();
      else again = true;
    });
  }

  function hang() {
    source?.close();
    source = null;
  }

  if (address) {
    listen();
    timer = setTimeout(soon, EVERY);
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) hang();
      else {
        listen();
        soon();
      }
    });
    addEventListener("pagehide", hang);
  } else {
    mark("");
  }

  return {
    refresh,
    toggle() {
      held = !held;
      mark(held ? "held" : "live");
      if (!held) refresh();
    },
  };
}

// What a person did to the page (focus, ticks, opened details, text typed) stays, since elements stay.
function merge(now, fresh) {
  for (const { name } of [...now.attributes]) {
    if (!fresh.hasAttribute(name) && !kept(now, name)) now.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (!kept(now, name) && now.getAttribute(name) !== value) now.setAttribute(name, value);
  }
  const named = new Map();
  for (const child of now.children) if (idOf(child)) named.set(idOf(child), child);
  let place = now.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    let found = null;
    const id = idOf(wanted);
    if (id && named.has(id)) found = named.get(id);
    else if (!id && place && !idOf(place) && alike(place, wanted)) found = place;
    if (!found) {
      now.insertBefore(document.importNode(wanted, true), place);
      continue;
    }
    if (found === place) place = place.nextSibling;
    else now.insertBefore(found, place);
    if (found.nodeType === Node.ELEMENT_NODE) {
      if (!found.isEqualNode(wanted)) merge(found, wanted);
    } else if (found.data !== wanted.data) found.data = wanted.data;
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

// Not node.id, which of a form with inputs named "id" is these inputs.
function idOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("id") : null;
}

function alike(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName;
}

function kept(element, name) {
  if (name === "open") return element.nodeName === "DETAILS";
  if (name === "class") return element.classList.contains("here") || element.id === "live-mark";
  return false;
}
