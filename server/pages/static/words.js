"use strict";
// Numbers as words, and words into the page. Text only: nothing a server says is ever read as markup.

function setText(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}

// `value` by `format`, a dash when it is not known.
function say(value, format) {
  return value === null || Number.isNaN(value) ? "–" : format(value);
}

function sayNumber(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

function saySeconds(seconds) {
  const ms = seconds * 1000;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return seconds < 100 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${Math.round(seconds)} s`;
}

function sayShare(share) {
  const percent = share * 100;
  return percent > 0 && percent < 10 ? `${percent.toFixed(1)} %` : `${Math.round(percent)} %`;
}

function sayTimes(ratio) {
  return `${ratio.toFixed(2)} ×`;
}

function sayCount(count, noun, when) {
  if (!count) return `no ${noun} ${when}`;
  return `${sayNumber(count)} ${noun}${count === 1 ? "" : "s"} ${when}`;
}

function sayDuration(seconds) {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (minutes < 1) return `${Math.max(0, Math.floor(seconds))} s`;
  if (hours < 1) return `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
