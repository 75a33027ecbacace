// Runs a page's script in Node on the few parts of the DOM that it uses, and prints the body.
//     node small_dom.js PAGE.html [#FRAGMENT [CARD:TOKEN]]
// CARD:TOKEN, counted from 0, is the token that is clicked.
// It knows no layout: every observed element is in view. An unknown part of the DOM is an error.
"use strict";

const fs = require("fs"), vm = require("vm");

const page = fs.readFileSync(process.argv[2], "utf-8");
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const unescaped = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");

class Text {
  constructor(text) { this.text = String(text); }
  get textContent() { return this.text; }
  get html() { return escaped(this.text); }
}

class Element {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, nodes: [], parent: null, dataset: {}, listeners: {} });
    const properties = this.properties = {};
    this.style = { setProperty: (name, value) => { properties[name] = value; } };
    this.classList = {
      add: (...names) => { this.classes = new Set([...this.classes, ...names]); },
      remove: (...names) => { this.classes = new Set([...this.classes].filter((n) => !names.includes(n))); },
      toggle: (name, isOn) => this.classList[isOn ? "add" : "remove"](name),
      contains: (name) => this.classes.has(name),
    };
  }
  get classes() { return new Set((this.attributes.class ?? "").split(" ").filter(Boolean)); }
  set classes(names) { this.attributes.class = [...names].join(" "); }
  set className(name) { this.attributes.class = name; }
  get children() { return this.nodes.filter((node) => node instanceof Element); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  set tabIndex(value) { this.setAttribute("tabindex", value); }
  set title(value) { this.setAttribute("title", value); }
  set hidden(value) { if (value) this.attributes.hidden = ""; else delete this.attributes.hidden; }
  get hidden() { return "hidden" in this.attributes; }
  addEventListener(name, listener) { (this.listeners[name] ??= []).push(listener); }
  append(...nodes) {
    for (const node of nodes.map((one) => one instanceof Element ? one : new Text(one))) {
      if (node instanceof Element) { node.remove(); node.parent = this; }
      this.nodes.push(node);
    }
  }
  remove() {
    if (this.parent) this.parent.nodes = this.parent.nodes.filter((node) => node !== this);
    this.parent = null;
  }
  after(...nodes) {
    for (const node of nodes) { node.remove(); node.parent = this.parent; }
    this.parent.nodes.splice(this.parent.nodes.indexOf(this) + 1, 0, ...nodes);
  }
  replaceChildren(...nodes) { this.nodes = []; this.append(...nodes); }
  get textContent() { return this.nodes.map((node) => node.textContent).join(""); }
  set textContent(text) { this.replaceChildren(text); }
  getBoundingClientRect() { return { left: 0, width: 100 }; }
  scrollIntoView() {}
  get html() {
    const style = Object.entries({ ...this.properties }).map(([n, v]) => `${n}: ${v};`).join(" ");
    const attributes = { ...this.attributes, ...(style ? { style } : {}) };
    for (const [name, value] of Object.entries(this.dataset)) attributes[`data-${name}`] = value;
    const shown = Object.entries(attributes).map(([n, v]) => ` ${n}="${escaped(String(v)).replace(/"/g, "&quot;")}"`);
    return `<${this.tag}${shown.join("")}>${this.nodes.map((node) => node.html).join("")}</${this.tag}>`;
  }
}

function parsed(source) {
  const root = new Element("body"), open = [root];
  for (const [, close, tag, attributes, text] of source.matchAll(/<(\/?)(\w+)([^>]*)>|([^<]+)/g)) {
    if (text !== undefined) open.at(-1).append(unescaped(text));
    else if (close) open.pop();
    else {
      const node = new Element(tag);
      for (const [, name, , value] of attributes.matchAll(/([\w-]+)(="([^"]*)")?/g)) node.setAttribute(name, value ?? "");
      open.at(-1).append(node);
      open.push(node);
    }
  }
  return root;
}

const body = parsed(/<body>([\s\S]*?)<script>/.exec(page)[1]);
const found = (node, id) => node.attributes.id === id ? node
  : node.children.map((child) => found(child, id)).find(Boolean) ?? null;
const document = {
  body,
  getElementById: (id) => found(body, id),
  createElement: (tag) => new Element(tag),
  createElementNS: (space, tag) => new Element(tag),
  addEventListener: () => {},
};
class IntersectionObserver {
  constructor(seen) { this.seen = seen; }
  observe(target) { this.seen([{ target, isIntersecting: true }]); }
}
const script = /<script>([\s\S]*)<\/script>/.exec(page)[1];
const atob = (text) => Buffer.from(text, "base64").toString("latin1");
vm.runInNewContext(script, { document, IntersectionObserver, atob, location: { hash: process.argv[3] ?? "" } });
const [card, token] = (process.argv[4] ?? "").split(":").map(Number);
if (token !== undefined) {
  const all = (node, name) => [
    ...(node.classList.contains(name) ? [node] : []), ...node.children.flatMap((child) => all(child, name))];
  const tokens = all(body, "tokens")[card];
  for (const listener of tokens.listeners.click) listener({ target: all(tokens, "t")[token] });
}
for (const script of body.children.filter((node) => node.tag === "script")) script.remove();
process.stdout.write(body.html);
