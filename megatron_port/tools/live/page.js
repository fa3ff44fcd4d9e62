"use strict";
// Asks this server for what has changed, and puts it in the place of what was there.
const NEAR = 2000, FAR = 15000;
const link = document.getElementById("link");
const shown = {};
let tag = "";

function say(text, bad) {
  if (link.textContent !== text) link.textContent = text;
  link.className = bad ? "bad" : "";
}

function place(name, html) {
  const part = document.getElementById(name);
  if (!part || shown[name] === html) return;
  const open = [...part.querySelectorAll("details")].map((one) => one.open);
  part.innerHTML = html;
  part.querySelectorAll("details").forEach((one, i) => { one.open = Boolean(open[i]); });
  shown[name] = html;
}

async function look() {
  try {
    const answer = await fetch("data", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      const parts = await answer.json();
      for (const name of Object.keys(parts)) place(name, parts[name]);
    } else if (answer.status !== 304) {
      throw new Error(String(answer.status));
    }
    say("live", false);
  } catch (error) {
    say("the server does not answer; `megatron-port watch` has ended, or the tunnel", true);
  }
  setTimeout(look, document.hidden ? FAR : NEAR);
}

look();
