// The log follows an answer while its end is in view, and draws messages when they come near.

import { at } from "./dom.js";

const NEAR = "1500px 0px"; // beyond what is visible

let pinned = true; // whether the log follows
let top = 0;

// Goes to the end, and stays there while it moves.
export function toEnd() {
  pinned = true;
  follow();
}

function follow() {
  if (pinned) at("log").scrollTop = at("log").scrollHeight;
  at("end").hidden = pinned;
}

function moved() {
  const log = at("log");
  // Scrolling up a little already lets go: an answer that grows would pull back at once.
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 3) pinned = true;
  else if (log.scrollTop < top) pinned = false;
  top = log.scrollTop;
  at("end").hidden = pinned;
}

const views = new WeakMap();
let observer = null;

// Draws a view when it is nearly visible.
export function whenNear(view) {
  if (!view.near) return;
  views.set(view.article, view);
  observer.observe(view.article);
}

export function startScrolling() {
  observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        observer.unobserve(target);
        views.get(target).near();
      }
    },
    { root: at("log"), rootMargin: NEAR },
  );
  at("log").addEventListener("scroll", moved, { passive: true });
  at("end").addEventListener("click", () => {
    toEnd();
    at("message").focus();
  });
  // Where a keyboard on the screen covers the page, the page becomes shorter, so that Send stays.
  visualViewport?.addEventListener("resize", () => {
    if (visualViewport.scale === 1) document.body.style.height = `${visualViewport.height}px`;
  });
  const resized = new ResizeObserver(follow);
  resized.observe(at("turns"));
  resized.observe(at("log"));
}
