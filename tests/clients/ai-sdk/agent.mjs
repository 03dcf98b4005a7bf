// An agent of the AI SDK: node agent.mjs BASE_URL MODEL QUESTION generate|stream
// It writes one line of JSON: its answer, and the cities that its tool was asked for. See ../test_agents.py.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, model, prompt, how] = process.argv.slice(2);
const degrees = { Rome: 21, Oslo: 4 };
const cities = [];
const weather = tool({
  description: 'Tells the weather of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    cities.push(city);
    return `${city} has ${degrees[city]} degrees.`;
  },
});
const baton = createOpenAICompatible({ name: 'baton', baseURL, apiKey: 'none', includeUsage: true });
const given = { model: baton(model), prompt, tools: { weather }, stopWhen: stepCountIs(5), maxRetries: 0 };
const result = how === 'stream' ? streamText(given) : await generateText(given);
console.log(JSON.stringify({ text: await result.text, cities }));
